"""Whole models in channels_last, stock against gn_override: the "Whole models" table.

    pip install diffusers timm
    python tools/bench_models.py --output models-h200   # on a GPU; some minutes
    python tools/bench_models.py --rows unet,vae
    python tools/bench_models.py --device cpu --tiny    # tries the script; the times mean nothing

Models have random weights: nothing is downloaded. Before a row is timed, outputs (training: loss
and gradients) are compared with the same model in float32: the override's relative error may be
1.1x stock's, which measures how much a model amplifies a change in rounding, plus one unit in the
last place. A row that fails is not timed, nor are those that would be timed with it, and the exit
status is 1.

Each model has rows of its own for `gn_override.fuse(model)`: the override's column is then the
model with its norms and activations fused. Models for inference have one compiled as a whole graph,
where the pass over that graph fuses them: stock is Inductor's own norm. What is next to the norms
there, tools/neighbours.py counts.

Two columns say what is left to win: the floor, where each norm, and what is fused with it, returns
its input; and "copies", where it copies its input. The floor of resnet50_gn is resnet50 with
BatchNorm: a comparison, not a bound.

Times are medians in milliseconds, the variants taken in turns; GPU times come from events. Rows of
the results file that were not measured again stay, with their own commit.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import results
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gn_override
from gn_override import _calls
from gn_override._bench import relative_error
from gn_override._clock import seconds_of
from gn_override._demo import calls_taken, no_tf32, randomise_affine

Step = Callable[[], Tensor]

UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
FUSED = ", activations fused"  # ends the names of such rows
TINY_UNET = {**UNET, "block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32}
TINY_VAE = {**VAE, "block_out_channels": (32, 32, 64, 64)}


@dataclass
class Row:
    """One line of the table; times in milliseconds, by variant."""

    name: str
    times: dict[str, float] = field(default_factory=dict)  # empty: not timed
    floor: str = ""  # what the variant "floor" is
    peak_gb: dict[str, float] = field(default_factory=dict)
    error_stock: float = float("nan")  # against float32, relative l2
    error_override: float = float("nan")
    error_bound: float = float("nan")
    calls: int = 0  # group normalisation calls that the override took in one step
    compiled: dict[str, int] = field(default_factory=dict)  # of tools/neighbours.py

    @property
    def parity(self) -> bool:
        """Whether the override ran, as exactly as it must (a NaN is not)."""
        return self.calls > 0 and self.error_override <= self.error_bound


@dataclass(frozen=True)
class Setting:
    """How this run is made."""

    device: str
    tiny: bool
    seconds: float  # of timing, for each variant of a row


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    log(f"  {name}: {time.perf_counter() - begin:.1f} s")


def with_norms_as(instead: Callable[[Tensor], Tensor], step: Step) -> Step:
    """The step with every norm replaced, and with it what it is fused with."""

    def norm(x: Tensor, *_others: Any, **_options: Any) -> Tensor:
        return instead(x)

    def run() -> Tensor:
        with (
            mock.patch.object(F, "group_norm", norm),
            mock.patch.object(gn_override.functional, "group_norm", norm),
            mock.patch.object(_calls, "group_norm_act", norm),
        ):
            return step()

    return run


def seeded(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A model with random weights, the same ones every time, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build()
    randomise_affine(model)
    return model


def placed(
    model: nn.Module, device: str, dtype: torch.dtype, layout: torch.memory_format
) -> nn.Module:
    # The stubs of Module.to() do not know of memory_format beside other arguments.
    return model.to(device=device, dtype=dtype).to(memory_format=layout)  # type: ignore[call-overload]


def check(
    row: Row,
    step: Step,
    reference: Step,
    dtype: torch.dtype,
    ours: Step | None = None,
    calls: int | None = None,
) -> bool:
    """Fill the row's errors, the override's from a step of its own if there is one.

    True if they are within the bound. `calls` are the override's, if they cannot be counted here.
    """
    with gn_override.disabled(), no_tf32():
        expected = reference()
    with gn_override.disabled():
        row.error_stock = relative_error(step(), expected)
    before = calls_taken()
    with gn_override.enabled():
        row.error_override = relative_error((ours or step)(), expected)
    row.calls = calls_taken() - before if calls is None else calls
    row.error_bound = 1.1 * row.error_stock + torch.finfo(dtype).eps
    verdict = "ok" if row.parity else "FAILED"
    log(
        f"  parity {verdict}: error {row.error_override:.3e}, stock {row.error_stock:.3e}, "
        f"bound {row.error_bound:.3e}, {row.calls} calls taken"
    )
    return row.parity


def fused_copy(model: nn.Module) -> nn.Module:
    """A copy of the model with its norms and activations fused."""
    model = copy.deepcopy(model)
    pairs = gn_override.fuse(model).fused
    if not pairs:
        raise RuntimeError(f"fuse() found nothing in a {type(model).__name__}")
    log(f"  {len(pairs)} pairs of norm and activation fused")
    return model


OF_FUSED = "fused "  # begins the names of such a row's variants while both rows are measured


def split(row: Row, fused: Row) -> list[Row]:
    """Two rows from the first, which was measured with variants of the fused model besides."""
    for field_name in ("times", "peak_gb"):
        measured = getattr(row, field_name)
        own = {name: measured.pop(name) for name in list(measured) if name.startswith(OF_FUSED)}
        own = {name.removeprefix(OF_FUSED): value for name, value in own.items()}
        setattr(fused, field_name, measured | own)
    return [row, fused]


@dataclass(frozen=True)
class Variant:
    """One column of a row: a step, and the state of the switch that it runs under."""

    step: Step
    on: bool = False


def measure(row: Row, variants: Mapping[str, Variant], setting: Setting) -> None:
    """Median time of every variant, in turns, into row.times (milliseconds)."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():  # warm up: algorithms chosen, memory allocated
        with gn_override._switched(variant.on):
            seconds_of(variant.step, setting.device, 1 if setting.tiny else 3)
    deadline = time.perf_counter() + setting.seconds * len(variants)
    while not samples["stock"] or time.perf_counter() < deadline:
        for name, variant in variants.items():
            with gn_override._switched(variant.on):
                samples[name].append(
                    seconds_of(variant.step, setting.device, 1 if setting.tiny else 5)
                )
    for name, values in samples.items():
        row.times[name] = round(1e3 * statistics.median(values), 3)


def captured(variant: Variant) -> Variant:
    """The variant as the replay of a CUDA graph."""
    with gn_override._switched(variant.on):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                variant.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = variant.step()

    def replay(_keeps: Variant = variant) -> Tensor:  # the model, whose memory the graph reads
        graph.replay()
        return output

    return Variant(replay, variant.on)


def inference(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Step:
    def step() -> Tensor:
        with torch.no_grad():
            return call(model)

    return step


def bench_compiled(
    name: str,
    model: nn.Module,
    call: Callable[[nn.Module, torch.memory_format, torch.dtype], Tensor],
    setting: Setting,
) -> list[Row]:
    """The model, or its decoder alone if it has one, compiled as one graph and replayed."""
    import neighbours  # loads Inductor, which the other rows do without

    row = Row(f"{name}, torch.compile and CUDA graph{FUSED}")
    dtype, last = torch.float16, torch.channels_last
    model = placed(model, setting.device, dtype, last).eval()
    exact = copy.deepcopy(model).to(torch.float32)
    reference = inference(exact, lambda m: call(m, last, torch.float32))

    def step_of(net: nn.Module) -> Step:
        return inference(net, lambda m: call(m, last, dtype))

    compiled = {}
    for key, on in (("stock", False), ("override", True)):
        net = copy.deepcopy(model)
        getattr(net, "decoder", net).compile(fullgraph=True)
        compiled[key] = Variant(step_of(net), on)
    ours = compiled["override"].step
    with gn_override.enabled():
        row.compiled = neighbours.generated(ours)
    variants = {key: captured(variant) for key, variant in compiled.items()}
    before = calls_taken()  # replays do not count
    with gn_override.enabled():
        ours()
        calls = calls_taken() - before
        row.compiled |= neighbours.launched(ours)
    log(f"  compiled: {row.compiled}")
    if calls != row.compiled["norms"]:
        raise RuntimeError(f"{calls} norms ran, of {row.compiled['norms']} in the compiled graph")
    if check(row, variants["stock"].step, reference, dtype, variants["override"].step, calls):
        measure(row, variants, setting)
    return [row]


def bench_inference(
    name: str,
    model: nn.Module,
    call: Callable[[nn.Module, torch.memory_format, torch.dtype], Tensor],
    setting: Setting,
    graph: bool,
) -> list[Row]:
    """Rows of one model: eager, and with a CUDA graph where there is a GPU and it is asked for."""
    dtype = torch.float16 if setting.device == "cuda" else torch.float32
    exact = torch.float32 if setting.device == "cuda" else torch.float64
    last, first = torch.channels_last, torch.contiguous_format
    model = placed(model, setting.device, dtype, last).eval()

    def step_of(net: nn.Module, layout: torch.memory_format, kind: torch.dtype) -> Step:
        return inference(net, lambda m: call(m, layout, kind))

    floor = "the model without its GroupNorms and what is fused with them"
    eager, fused = (Row(f"{name}, eager{kind}", floor=floor) for kind in ("", FUSED))
    step, fused_step = (step_of(net, last, dtype) for net in (model, fused_copy(model)))
    with phase("parity"):
        reference = step_of(copy.deepcopy(model).to(exact), last, exact)
        good = check(eager, step, reference, dtype)
        good = check(fused, step, reference, dtype, fused_step) and good
    if not good:
        return [eager, fused]

    nchw = placed(copy.deepcopy(model), setting.device, dtype, first)
    variants = {
        "stock": Variant(step),
        "override": Variant(step, on=True),
        "stock_nchw": Variant(step_of(nchw, first, dtype)),
        OF_FUSED + "override": Variant(fused_step, on=True),
    }
    for kind, own_step in (("", step), (OF_FUSED, fused_step)):
        variants[kind + "floor"] = Variant(with_norms_as(lambda x: x, own_step), on=True)
        variants[kind + "copies"] = Variant(with_norms_as(Tensor.clone, own_step), on=True)
    rows = []
    if graph and setting.device == "cuda":
        replayed, fused_replayed = (
            Row(row.name.replace("eager", "CUDA graph"), floor=floor) for row in (eager, fused)
        )
        with phase("CUDA graph"):
            replays = {key: captured(variant) for key, variant in variants.items()}
            for row, kind, calls in (
                (replayed, "", eager.calls),
                (fused_replayed, OF_FUSED, fused.calls),
            ):
                ours = replays[kind + "override"].step
                if not check(row, replays["stock"].step, reference, dtype, ours, calls):
                    return [eager, fused, row]
            measure(replayed, replays, setting)
        rows = split(replayed, fused_replayed)
    with phase("eager"):
        measure(eager, variants, setting)
    return rows + split(eager, fused)


def bench_unet(setting: Setting, compiled: bool = False) -> list[Row]:
    """One denoising step of the Stable Diffusion 1.5 UNet, batch 2."""
    from diffusers import UNet2DConditionModel
    from diffusers.utils import logging

    logging.set_verbosity_error()
    config: dict[str, Any] = TINY_UNET if setting.tiny else UNET
    size = 16 if setting.tiny else 64
    with phase("model"):
        model = seeded(lambda: UNet2DConditionModel(**config), setting.device)
    latents = torch.randn(2, 4, size, size, device=setting.device)
    tokens = torch.randn(2, 77, config["cross_attention_dim"], device=setting.device)
    timestep = torch.full((2,), 500, device=setting.device)
    inputs: dict[Any, tuple[Tensor, Tensor]] = {}

    def call(net: nn.Module, layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
        # Made once: a CUDA graph reads the same memory at every replay.
        if (layout, dtype) not in inputs:
            inputs[layout, dtype] = latents.to(dtype, memory_format=layout), tokens.to(dtype)
        x, context = inputs[layout, dtype]
        output: Tensor = net(x, timestep, encoder_hidden_states=context, return_dict=False)[0]
        return output

    name = "SD 1.5 UNet step, batch 2, 64x64 latents"
    if compiled:
        return bench_compiled(name, model, call, setting)
    return bench_inference(name, model, call, setting, graph=True)


def bench_vae(setting: Setting, compiled: bool = False) -> list[Row]:
    """The Stable Diffusion VAE decoder, 1024x1024 pixels."""
    from diffusers import AutoencoderKL
    from diffusers.utils import logging

    logging.set_verbosity_error()
    config = TINY_VAE if setting.tiny else VAE
    size = 8 if setting.tiny else 128
    with phase("model"):
        model = seeded(lambda: AutoencoderKL(**config), setting.device)
    latents = torch.randn(1, 4, size, size, device=setting.device)

    def call(net: nn.Module, layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
        x = latents.to(dtype, memory_format=layout)
        output: Tensor = net.decode(x, return_dict=False)[0]  # type: ignore[operator]
        return output

    name = "SD VAE decode, 1024x1024"
    if compiled:
        return bench_compiled(name, model, call, setting)
    return bench_inference(name, model, call, setting, graph=False)


def training(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    autocast: torch.dtype | None,
    update: bool,
) -> Step:
    """One training step: forward, loss, backward, and SGD if `update`.

    Without `update` the step returns the loss and all gradients, flat.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(images.device.type, dtype=autocast) if autocast else nullcontext()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if update:
            optimizer.step()
            return loss
        gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
        return torch.cat([loss.detach().float().view(1), *gradients])

    return step


def peak_gb(variant: Variant) -> float:
    """Peak of allocated memory in one step, parameters and gradients included."""
    with gn_override._switched(variant.on):
        variant.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        variant.step()
        torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 1e9, 3)


def bench_resnet(setting: Setting) -> list[Row]:
    """timm resnet50_gn training, batch 64, in bf16 and with bf16 autocast over float32.

    Autocast in both modes of set_autocast(), which changes nothing in stock.
    """
    rows = []
    cast = "bf16 autocast, fp32 parameters"
    for autocast, mode, kind in (
        (None, "float32", "bf16"),
        (torch.bfloat16, "float32", cast),
        (torch.bfloat16, "preserve", f'{cast}, set_autocast("preserve")'),
    ):
        gn_override.set_autocast(mode)
        name = f"timm resnet50_gn training, batch 64, {kind}"
        rows += bench_training(name, autocast, setting)
    gn_override.set_autocast("float32")
    return rows


def bench_training(name: str, autocast: torch.dtype | None, setting: Setting) -> list[Row]:
    """The rows of one kind of training. No model is left when it returns: peaks count them all."""
    import timm

    batch, size = (2, 64) if setting.tiny else (64, 224)
    images = torch.randn(batch, 3, size, size, device=setting.device)
    labels = torch.randint(1000, (batch,), device=setting.device)
    last, first = torch.channels_last, torch.contiguous_format
    row, fused_row = (Row(f"{name}{end}", floor="resnet50 with BatchNorm") for end in ("", FUSED))
    log(row.name)

    def build(net: str, layout: torch.memory_format) -> tuple[nn.Module, Tensor]:
        dtype = torch.float32 if autocast else torch.bfloat16
        model = seeded(lambda: timm.create_model(net, pretrained=False), setting.device)
        model = placed(model, setting.device, dtype, layout).train()
        return model, images.to(dtype, memory_format=layout)

    def step_of(net: str, layout: torch.memory_format, fused: bool = False) -> Step:
        model, x = build(net, layout)
        return training(fused_copy(model) if fused else model, x, labels, autocast, update=True)

    with phase("parity"):
        model, x = build("resnet50_gn", last)
        reference = training(copy.deepcopy(model).float(), x.float(), labels, None, update=False)
        plain, fused = (
            training(net, x, labels, autocast, update=False) for net in (model, fused_copy(model))
        )
        good = check(row, plain, reference, torch.bfloat16)
        good = check(fused_row, plain, reference, torch.bfloat16, fused) and good
        del model, x, reference, plain, fused
    if not good:
        return [row, fused_row]

    peaks = {}
    if setting.device == "cuda":
        # With one model in memory at a time.
        torch.cuda.empty_cache()
        variant = Variant(step_of("resnet50_gn", last, fused=True), on=True)
        peaks[OF_FUSED + "override"] = peak_gb(variant)
        del variant
        torch.cuda.empty_cache()
    shared = step_of("resnet50_gn", last)
    variants = {"stock": Variant(shared), "override": Variant(shared, on=True)}
    if setting.device == "cuda":
        row.peak_gb = peaks | {name: peak_gb(variant) for name, variant in variants.items()}
    variants[OF_FUSED + "override"] = Variant(step_of("resnet50_gn", last, fused=True), on=True)
    variants["stock_nchw"] = Variant(step_of("resnet50_gn", first))
    variants["floor"] = Variant(step_of("resnet50", last))
    with phase("timing"):
        measure(row, variants, setting)
    return split(row, fused_row)


BENCHES: dict[str, Callable[[Setting], list[Row]]] = {
    "unet": bench_unet,
    "vae": bench_vae,
    "resnet": bench_resnet,
    "unet_compiled": partial(bench_unet, compiled=True),
    "vae_compiled": partial(bench_vae, compiled=True),
}


def missing(name: str, device: str) -> str:
    """What a bench lacks here, or ""."""
    package = "timm" if name == "resnet" else "diffusers"
    if importlib.util.find_spec(package) is None:
        return package
    return "a GPU" if name.endswith("compiled") and device == "cpu" else ""  # for a CUDA graph


def machine(device: str) -> dict[str, Any]:
    """The head of the results file."""
    head = results.machine(device) | {"unit": "milliseconds, median"}
    for package in ("diffusers", "timm"):
        try:
            head[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # its rows were not asked for
    return head


def table(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    lines = [
        f"{'ms':<{width}} {'stock':>9} {'override':>9} {'speed-up':>9} {'NCHW':>9} {'floor':>9}"
        f" {'copies':>9}  peak GB stock/override"
    ]
    for row in rows:
        if not row.parity:
            lines.append(
                f"{row.name:<{width}} PARITY FAILED: error {row.error_override:.2e}, "
                f"bound {row.error_bound:.2e}, {row.calls} calls taken"
            )
            continue
        if not row.times:
            lines.append(f"{row.name:<{width}} not timed: a row beside it failed")
            continue
        t = row.times
        peak = " / ".join(f"{row.peak_gb[k]:.2f}" for k in ("stock", "override") if row.peak_gb)
        rest = " ".join(
            f"{t[key]:>9.2f}" if key in t else f"{'-':>9}"
            for key in ("stock_nchw", "floor", "copies")
        )
        lines.append(
            f"{row.name:<{width}} {t['stock']:>9.2f} {t['override']:>9.2f} "
            f"{t['stock'] / t['override']:>8.2f}x {rest}  {peak}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--rows", default="", help="comma-separated; default: all that can run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, a variant")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here (--device cpu --tiny tries the script)")
    lacks = {name: missing(name, options.device) for name in BENCHES}
    names = options.rows.split(",") if options.rows else [n for n in BENCHES if not lacks[n]]
    for name in names:
        if name not in BENCHES:
            parser.error(f"--rows: {name} is none of {', '.join(BENCHES)}")
        if lacks[name]:
            parser.error(f"--rows: {name} needs {lacks[name]}")
    if not names:
        parser.error("the rows need diffusers or timm")
    for name in BENCHES:
        if not options.rows and lacks[name]:
            log(f"{name} is left out: it needs {lacks[name]}")

    begin = time.perf_counter()
    setting = Setting(options.device, options.tiny, 0.0 if options.tiny else options.seconds)
    rows: list[Row] = []
    for name in names:
        log(name)
        rows += BENCHES[name](setting)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.output:
            head = machine(options.device) | {"tiny": options.tiny}
            where = {"commit": head["commit"], "date": head["date"]}
            head["rows"] = [asdict(row) | {"parity": row.parity} | where for row in rows]
            log(f"wrote {results.update(options.output, head, 'name', options.folder)}")
    log(f"{time.perf_counter() - begin:.0f} s")
    print(table(rows))
    return 0 if all(row.parity for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
