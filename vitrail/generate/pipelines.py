"""Published text-to-image models as a `Diffuser`: Stable Diffusion 1.x and 2.x, SDXL and SDXL-Turbo, SD3, by diffusers.

Images are noised and denoised as latents. Text embeddings of classes and latents of images are computed once. Many
images are denoised in one call, guided and unguided rows together.

Weights have licences of their own, which restrict their use; read the model's card. No safety filter runs on the
samples: look at them before they are shown to anybody.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.generate.diffusion_model import PURE_NOISE, Diffuser, as_signed, steps_run

Kind = Literal["sd", "sdxl", "sd3"]
KINDS: dict[str, Kind] = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
}
GUIDANCE: dict[Kind, float] = {"sd": 7.5, "sdxl": 7.5, "sd3": 7.0}
STEPS, TURBO_STEPS = 50, 10
KEPT_LATENTS = 4096  # images whose latents are cached


def load_pipeline(
    name: str | Path,
    *,
    local_files_only: bool = True,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A diffusers pipeline from a folder, or by its name on the hub; nothing is fetched unless asked for.

    Raises `ImportError` where diffusers is missing, `FileNotFoundError` where the weights are.
    """
    diffusers = _diffusers()
    try:
        options = {"torch_dtype": dtype, "local_files_only": local_files_only}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(name), **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise FileNotFoundError(
            f"no diffusion pipeline {str(name)!r} could be read ({reason}); give a folder that holds one, or fetch it "
            "once with local_files_only=False"
        ) from None
    return pipeline.to(device)


def _diffusers() -> Any:
    try:
        return import_module("diffusers")
    except ImportError:
        raise ImportError(
            "published diffusion models need diffusers and transformers; install them with: pip install "
            "'vitrail[generate]', or train a model of your own with: vitrail train small-diffusion"
        ) from None


class PipelineDiffuser(Diffuser):
    """A diffusers pipeline, with a prompt for each class (`vitrail.generate.generation_methods`).

    As GeNIe's code (arXiv 2312.02548): images at the pipeline's own size (shorter side resized, centre cropped);
    the mode of the VAE's posterior times its scale; DPM-Solver++ of second order over `steps` times, of which those
    with time - 1 > 1000 r are left out; r above 0.999 is noise alone. SD3 is a flow whose times are uneven, so there
    the last floor(r * steps) are taken, from the noise of the first of them. SDXL-Turbo, too, is solved by
    DPM-Solver++, which draws no new noise on the way. Images come out at the pipeline's size.

    `steps` and `guidance` are, where not given, 50 and 7.5 (SD3: 7); for SDXL-Turbo 10 and 1, which is none.
    """

    def __init__(
        self,
        pipeline: Any,
        classes: Sequence[str],
        prompts: Sequence[str],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        batch: int = 16,
        name: str = "",
    ) -> None:
        self.diffusers = _diffusers()
        kind = KINDS.get(type(pipeline).__name__)
        if kind is None:
            raise ValueError(f"{type(pipeline).__name__} is not known here; use one of {', '.join(KINDS)}")
        if len(prompts) != len(classes):
            raise ValueError(f"{len(classes)} classes need as many prompts, not {len(prompts)}")
        self.kind, self.pipeline = kind, pipeline
        self.name = name or str(getattr(pipeline, "name_or_path", "") or type(pipeline).__name__)
        turbo = kind == "sdxl" and "turbo" in self.name.lower()
        self.classes, self.prompts, self.batch = tuple(classes), tuple(prompts), batch
        self.steps = steps or (TURBO_STEPS if turbo else STEPS)
        self.guidance = guidance if guidance is not None else 1.0 if turbo else GUIDANCE[kind]
        self.network = pipeline.transformer if kind == "sd3" else pipeline.unet
        self.size = int(self.network.config.sample_size) * 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        if pipeline.vae.config.get("force_upcast"):  # SDXL's overflows in half precision
            pipeline.vae.to(torch.float32)
        for part in (self.network, pipeline.vae):
            part.eval()
        self.encoded = 0  # images that went through the VAE, prompts through the text encoders
        self.read = 0
        self._text: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self._latents: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def guided(self) -> bool:
        return self.guidance != 1

    def steps_taken(self, r: float) -> int:
        return len(self._scheduler(r)[1])

    def _scheduler(self, r: float) -> tuple[Any, Tensor]:
        """A scheduler and the times of its steps, largest first."""
        settings = self.pipeline.scheduler.config
        if self.kind == "sd3":
            flow = self.diffusers.FlowMatchEulerDiscreteScheduler
            scheduler = flow.from_config(settings, use_dynamic_shifting=False)
            scheduler.set_timesteps(self.steps, device=self.device)
            skipped = self.steps - steps_run(r, self.steps)
        else:
            changes = {"algorithm_type": "dpmsolver++", "solver_order": 2, "timestep_spacing": "linspace"}
            scheduler = self.diffusers.DPMSolverMultistepScheduler.from_config(settings, **changes)
            scheduler.set_timesteps(self.steps, device=self.device)
            last = scheduler.config.num_train_timesteps * (1.0 if r > PURE_NOISE else r)
            skipped = 0 if r > PURE_NOISE else int((scheduler.timesteps - 1 > last).sum())
        scheduler.set_begin_index(skipped)
        return scheduler, scheduler.timesteps[skipped:]

    @torch.inference_mode()
    def _run(self, images: Tensor | None, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        scheduler, times = self._scheduler(r)
        channels, side = int(self.network.config.in_channels), int(self.network.config.sample_size)
        noise = normal_noise(seeds.to(self.device), channels, side, side)
        if images is None or r > PURE_NOISE:
            z = noise
        else:
            z = self._noised(scheduler, self.latents(images), noise, r, len(times))
        text = self._text_inputs([self.prompts[int(t)] for t in target])
        for time in times:
            z = scheduler.step(self._network_output(z, time, text), time, z, return_dict=False)[0]
        return self._decoded(z)

    def _noised(self, scheduler: Any, latents: Tensor, noise: Tensor, r: float, steps: int) -> Tensor:
        if self.kind == "sd3":
            share = scheduler.sigmas[self.steps - steps].to(latents)  # 0 after the last step: nothing is added
            return share * noise + (1 - share) * latents
        last = scheduler.config.num_train_timesteps
        if steps == 0:
            return latents
        kept = scheduler.alphas_cumprod[min(int(last * r), last - 1)].to(latents)
        return kept.sqrt() * latents + (1 - kept).sqrt() * noise

    def _network_output(self, z: Tensor, time: Tensor, text: dict[str, Tensor]) -> Tensor:
        """The guided output of the network on latents, in float32."""
        dtype = next(self.network.parameters()).dtype
        rows = (torch.cat([z, z]) if self.guided else z).to(dtype)
        options: dict[str, Any] = {"encoder_hidden_states": text["text"], "return_dict": False}
        if self.kind == "sd3":
            times = time.expand(len(rows))
            output = self.network(hidden_states=rows, timestep=times, pooled_projections=text["pooled"], **options)[0]
        else:
            if self.kind == "sdxl":
                sizes = torch.tensor([[self.size, self.size, 0, 0, self.size, self.size]], device=z.device, dtype=dtype)
                options["added_cond_kwargs"] = {"text_embeds": text["pooled"], "time_ids": sizes.expand(len(rows), -1)}
            output = self.network(rows, time, **options)[0]
        output = output.float()
        if self.guided:
            conditional, unconditional = output.chunk(2)
            output = unconditional + self.guidance * (conditional - unconditional)
        return output

    def _text_inputs(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Text embeddings for the rows of one call: with the prompts, then (guided) without."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._text:
                self._text[prompt] = self._encode_prompt(prompt)
        pairs = [self._text[prompt] for prompt in prompts]
        rows = [positive for positive, _ in pairs] + ([negative for _, negative in pairs] if self.guided else [])
        return {part: torch.cat([row[part] for row in rows]) for part in rows[0]}

    def _encode_prompt(self, prompt: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        more = {"prompt_2": None, "prompt_3": None} if self.kind == "sd3" else {}
        options = {"num_images_per_prompt": 1, "do_classifier_free_guidance": self.guided, **more}
        with torch.inference_mode():
            text = self.pipeline.encode_prompt(prompt, device=self.device, **options)
        self.read += 1
        if self.kind == "sd":
            return {"text": text[0]}, {"text": text[1]}
        return {"text": text[0], "pooled": text[2]}, {"text": text[1], "pooled": text[3]}

    @torch.inference_mode()
    def latents(self, images: Tensor) -> Tensor:
        """Latents [batch, channels, rows, columns] in float32; those of recent images are cached."""
        keys = [hashlib.sha256(image.cpu().contiguous().numpy().tobytes()).hexdigest() for image in images]
        fresh = list(dict.fromkeys(key for key in keys if key not in self._latents))
        if fresh:
            encoded = self._encoded(images[[keys.index(key) for key in fresh]])
            self._latents.update(zip(fresh, encoded, strict=True))
        for key in keys:
            self._latents.move_to_end(key)
        latents = torch.stack([self._latents[key] for key in keys])
        while len(self._latents) > KEPT_LATENTS:
            self._latents.popitem(last=False)
        return latents

    def _encoded(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        signed = square(as_signed(images.to(self.device)), self.size).to(next(vae.parameters()).dtype)
        mode = vae.encode(signed).latent_dist.mode().float()
        self.encoded += len(images)
        return (mode - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor

    def _decoded(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        plain = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
        return vae.decode(plain.to(next(vae.parameters()).dtype), return_dict=False)[0].float().clamp(-1, 1)


def square(images: Tensor, side: int) -> Tensor:
    """Images [batch, 3, height, width] with the shorter side resized and the centre cropped: [batch, 3, side, side]."""
    height, width = images.shape[-2:]
    if (height, width) != (side, side):
        scale = side / min(height, width)
        size = (max(side, round(height * scale)), max(side, round(width * scale)))
        images = F.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False).clamp(-1, 1)
    top, left = (images.shape[-2] - side) // 2, (images.shape[-1] - side) // 2
    return images[..., top : top + side, left : left + side]
