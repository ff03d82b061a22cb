"""Published text-to-image models as a `Diffuser`: Stable Diffusion 1.x and 2.x, SDXL and SDXL-Turbo, SD3, by diffusers.

Images are noised and denoised as latents. What does not change is computed once: the text of a class, the latents of an
image. Many images are denoised in one call, guided and unguided rows together.

Weights have licences of their own, which say what may be made with them; read the model's card. No safety filter runs
on what is made: look at it before it is shown to anybody.
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
from vitrail.generate.diffusion_model import PURE_NOISE, as_given, as_signed, check_request, steps_run

Kind = Literal["sd", "sdxl", "sd3"]
KINDS: dict[str, Kind] = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
}
GUIDANCE: dict[Kind, float] = {"sd": 7.5, "sdxl": 7.5, "sd3": 7.0}
STEPS, TURBO_STEPS = 50, 10
KEPT_LATENTS = 4096  # images whose latents are remembered


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
        found = diffusers.DiffusionPipeline.from_pretrained(
            str(name), torch_dtype=dtype, local_files_only=local_files_only
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise FileNotFoundError(
            f"no diffusion pipeline {str(name)!r} could be read ({reason}); give a folder that holds one, or fetch it "
            "once with local_files_only=False"
        ) from None
    return found.to(device)


def _diffusers() -> Any:
    try:
        return import_module("diffusers")
    except ImportError:
        raise ImportError(
            "published diffusion models need diffusers and transformers; install them with: pip install "
            "'vitrail[generate]', or train a model of your own with: vitrail train small-diffusion"
        ) from None


class PipelineDiffuser:
    """A diffusers pipeline, with a prompt for each class (`vitrail.generate.methods`).

    As GeNIe's code (arXiv 2312.02548): images at the pipeline's own size (shorter side resized, centre cropped);
    the mode of the VAE's posterior times its scale; DPM-Solver++ of second order over `steps` times, of which those
    with time - 1 > 1000 r are left out; r above 0.999 is noise alone. SD3 is a flow whose times are uneven, so there
    the last floor(r * steps) are made, from the noise that the first of them has. SDXL-Turbo, too, is solved by
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
    def shrinks(self) -> int:
        """Pixels of a latent."""
        return 2 ** (len(self.pipeline.vae.config.block_out_channels) - 1)

    @property
    def size(self) -> int:
        """Side of the images that it makes."""
        return int(self.network.config.sample_size) * self.shrinks

    @property
    def guided(self) -> bool:
        return self.guidance != 1

    def evaluations(self, r: float) -> int:
        return self.steps_made(r) * (2 if self.guided else 1)

    def steps_made(self, r: float) -> int:
        """Steps from noise level r on."""
        return len(self._way(r)[1])

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        target, seeds = check_request(self.classes, target, seeds, images)
        pieces = [slice(first, first + self.batch) for first in range(0, len(images), self.batch)]
        made = [self._run(images[rows], target[rows], r, seeds[rows]).to(images.device) for rows in pieces]
        return as_given(torch.cat(made), images.dtype) if made else images.clone()

    def txt2img(self, target: Tensor, seeds: Tensor) -> Tensor:
        target, seeds = check_request(self.classes, target, seeds)
        pieces = [slice(first, first + self.batch) for first in range(0, len(target), self.batch)]
        made = [self._run(None, target[rows], 1.0, seeds[rows]).cpu() for rows in pieces]
        return as_given(torch.cat(made) if made else torch.empty(0, 3, self.size, self.size), torch.uint8)

    def _way(self, r: float) -> tuple[Any, Tensor]:
        """A scheduler and the times to be made, largest first."""
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
        """Images in -1..1."""
        scheduler, times = self._way(r)
        channels, side = int(self.network.config.in_channels), int(self.network.config.sample_size)
        noise = normal_noise(seeds.to(self.device), channels, side, side)
        if images is None or r > PURE_NOISE:
            z = noise
        else:
            z = self._noised(scheduler, self.latents(images), noise, r, len(times))
        given = self._texts([self.prompts[int(t)] for t in target])
        for time in times:
            z = scheduler.step(self._guess(z, time, given), time, z, return_dict=False)[0]
        return self._decoded(z)

    def _noised(self, scheduler: Any, latents: Tensor, noise: Tensor, r: float, made: int) -> Tensor:
        if self.kind == "sd3":
            share = scheduler.sigmas[self.steps - made].to(latents)  # 0 after the last step: nothing is added
            return share * noise + (1 - share) * latents
        last = scheduler.config.num_train_timesteps
        if made == 0:
            return latents
        kept = scheduler.alphas_cumprod[min(int(last * r), last - 1)].to(latents)
        return kept.sqrt() * latents + (1 - kept).sqrt() * noise

    def _guess(self, z: Tensor, time: Tensor, given: dict[str, Tensor]) -> Tensor:
        """What the network says of latents, guided, in float32."""
        dtype = next(self.network.parameters()).dtype
        rows = (torch.cat([z, z]) if self.guided else z).to(dtype)
        if self.kind == "sd3":
            guessed = self.network(
                hidden_states=rows,
                timestep=time.expand(len(rows)),
                encoder_hidden_states=given["text"],
                pooled_projections=given["pooled"],
                return_dict=False,
            )[0]
        else:
            more = {}
            if self.kind == "sdxl":
                sizes = torch.tensor([[self.size, self.size, 0, 0, self.size, self.size]], device=z.device, dtype=dtype)
                more["added_cond_kwargs"] = {"text_embeds": given["pooled"], "time_ids": sizes.expand(len(rows), -1)}
            guessed = self.network(rows, time, encoder_hidden_states=given["text"], return_dict=False, **more)[0]
        guessed = guessed.float()
        if self.guided:
            with_text, without = guessed.chunk(2)
            guessed = without + self.guidance * (with_text - without)
        return guessed

    def _texts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """What the network reads, for the rows of one call: with the prompts, then (guided) without."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._text:
                self._text[prompt] = self._read(prompt)
        found = [self._text[prompt] for prompt in prompts]
        rows = [with_text for with_text, _ in found] + ([without for _, without in found] if self.guided else [])
        return {part: torch.cat([row[part] for row in rows]) for part in rows[0]}

    def _read(self, prompt: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        more = {"prompt_2": None, "prompt_3": None} if self.kind == "sd3" else {}
        options = {"num_images_per_prompt": 1, "do_classifier_free_guidance": self.guided, **more}
        with torch.inference_mode():
            found = self.pipeline.encode_prompt(prompt, device=self.device, **options)
        self.read += 1
        if self.kind == "sd":
            return {"text": found[0]}, {"text": found[1]}
        return {"text": found[0], "pooled": found[2]}, {"text": found[1], "pooled": found[3]}

    @torch.inference_mode()
    def latents(self, images: Tensor) -> Tensor:
        """Latents [batch, channels, rows, columns] in float32; those of an image that was seen before are kept."""
        keys = [hashlib.sha256(one.cpu().contiguous().numpy().tobytes()).hexdigest() for one in images]
        fresh = list(dict.fromkeys(key for key in keys if key not in self._latents))
        if fresh:
            rows = [keys.index(key) for key in fresh]
            for key, one in zip(fresh, self._encoded(images[rows]), strict=True):
                self._latents[key] = one
        for key in keys:
            self._latents.move_to_end(key)
        found = torch.stack([self._latents[key] for key in keys])
        while len(self._latents) > KEPT_LATENTS:
            self._latents.popitem(last=False)
        return found

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
    """Images [batch, 3, height, width] with the shorter side resized and the centre cut out: [batch, 3, side, side]."""
    height, width = images.shape[-2:]
    if (height, width) != (side, side):
        scale = side / min(height, width)
        size = (max(side, round(height * scale)), max(side, round(width * scale)))
        images = F.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False).clamp(-1, 1)
    top, left = (images.shape[-2] - side) // 2, (images.shape[-1] - side) // 2
    return images[..., top : top + side, left : left + side]
