"""ResMLP for sequences: causal, indifferent to padding, able to learn (architectures-and-training §10.2 item 14)."""

from __future__ import annotations

import pytest
import torch

from vitrail.model.seq2seq import SequenceConfig, SequenceResMlp


def small(**changes: object) -> SequenceResMlp:
    torch.manual_seed(0)
    options = {"words": 12, "width": 16, "hidden": 32, "layers": 2, "heads": 2, "longest": 12, "drop": 0.0, **changes}
    model = SequenceResMlp(SequenceConfig(**options)).eval()
    for parameter in model.parameters():  # shifts and biases away from 0, or padding would do no harm
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    with torch.no_grad():
        model.embed.weight[0].zero_()
    return model


def test_a_word_depends_on_earlier_words_only() -> None:
    model, source = small(), torch.randint(3, 12, (2, 7))
    target = torch.randint(3, 12, (2, 9))
    before = model(source, target)
    for t in range(9):
        changed = target.clone()
        changed[:, t] = (changed[:, t] - 3 + 1) % 9 + 3
        after = model(source, changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:])


@pytest.mark.parametrize("rezero", [True, False])
def test_padding_changes_nothing_only_where_it_is_set_to_zero_again(rezero: bool) -> None:
    model = small(rezero=rezero)
    source, target = torch.randint(3, 12, (2, 5)), torch.randint(3, 12, (2, 4))
    padded = torch.nn.functional.pad(source, (0, 6))
    alone, among = model(source, target), model(padded, torch.nn.functional.pad(target, (0, 3)))[:, :4]
    assert torch.allclose(alone, among, atol=1e-5) == rezero


def test_parameters_follow_the_closed_form() -> None:
    width, hidden, layers, longest, words = 16, 32, 2, 12, 12
    mlp = 2 * width * hidden + hidden + width
    encoder = longest**2 + longest + mlp + 4 * width + 2 * width
    decoder = encoder + 2 * width + width + 4 * width**2 + 4 * width
    expected = words * width + layers * (encoder + decoder) + 4 * width + words * (width + 1)
    assert sum(p.numel() for p in small().parameters()) == expected


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 13 tokens is longer than the 12"):
        small().encode(torch.ones(1, 13, dtype=torch.int64))


def reversal(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources of 3 to 5 words, and the same words backwards between begin and end."""
    lengths = torch.randint(3, 6, (count,), generator=generator)
    source = torch.randint(3, 9, (count, 5), generator=generator)
    source[torch.arange(5)[None] >= lengths[:, None]] = 0
    target = torch.zeros(count, 7, dtype=torch.int64)
    target[:, 0] = 1
    for row, length in enumerate(lengths.tolist()):
        target[row, 1 : length + 1] = source[row, :length].flip(0)
        target[row, length + 1] = 2
    return source, target


def test_it_learns_to_reverse() -> None:
    torch.manual_seed(0)
    model = SequenceResMlp(
        SequenceConfig(words=9, width=32, hidden=64, layers=2, heads=4, longest=8, drop=0.0, layerscale=0.2)
    )
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        model.loss(*reversal(64, generator)).backward()
        optimizer.step()
    model.eval()
    source, target = reversal(100, torch.Generator().manual_seed(1))
    found = torch.nn.functional.pad(model.translate(source, 6), (0, 7))[:, :7]
    assert (found == target).all(1).float().mean() > 0.9
    greedy = torch.nn.functional.pad(model.translate(source, 6, beams=1), (0, 7))[:, :7]
    assert (greedy == target).all(1).float().mean() > 0.9


def test_beam_search_finds_what_trying_everything_finds() -> None:
    model = small(words=5, longest=6)
    source = torch.randint(3, 5, (3, 4))
    with torch.no_grad():
        memory, there = model.encode(source)
        best: list[tuple[float, list[int]]] = []
        for row in range(3):
            choices = []
            for a in range(1, 5):
                for b in range(1, 5):
                    words = [1, a] if a == 2 else [1, a, b]
                    full = model.decode(torch.tensor([words[:-1]]), memory[row : row + 1], there[row : row + 1])[0]
                    total = sum(float(full.log_softmax(-1)[i, w]) for i, w in enumerate(words[1:]))
                    choices.append((total / len(words), words))
            best.append(max(choices))
    found = model.translate(source, 2, beams=16)
    for row in range(3):
        assert [w for w in found[row].tolist() if w] == best[row][1]
