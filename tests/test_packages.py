"""Models of diffusers, timm, torchvision and transformers, small ones, from configurations.

A package that is not installed skips its models. Each is converted to channels-last, and run with
the override off and on: in float64, where rounding hides nothing, all outputs and gradients have to
agree; in float32 outputs have to be as near to float64 with it as without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from reference import BACKWARD, FORWARD, calls, lay_out, max_error, override_off, randomised
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import gn_override


class Sample(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    inputs: tuple[Any, ...]


MODELS: dict[str, Callable[[], Sample]] = {}


def model(build: Callable[[], Sample]) -> Callable[[], Sample]:
    MODELS[build.__name__] = build
    return build


# -- diffusers -----------------------------------------------------------------------------------

UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 24}
HEADS = {"norm_num_groups": 8, "attention_head_dim": 8}
TIME, TEXT = torch.tensor([3]), (1, 5, 24)


def of_diffusers(name: str, **config: Any) -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return getattr(diffusers, name)(**config)


def blocks(kind: str, ends: str = "") -> dict[str, tuple[str, str]]:
    """The down and up blocks of a UNet of two levels."""
    return {
        "down_block_types": (f"CrossAttnDownBlock{kind}{ends}", f"DownBlock{kind}{ends}"),
        "up_block_types": (f"UpBlock{kind}{ends}", f"CrossAttnUpBlock{kind}{ends}"),
    }


@model
def diffusers_unet() -> Sample:
    net = of_diffusers("UNet2DConditionModel", **HEADS, **blocks("2D"), **UNET)
    return Sample(net, (torch.randn(1, 4, 16, 16), TIME, torch.randn(TEXT)))


@model
def diffusers_unet_of_videos() -> Sample:
    net = of_diffusers("UNet3DConditionModel", **HEADS, **blocks("3D"), **UNET)
    return Sample(net, (torch.randn(1, 4, 3, 16, 16), TIME, torch.randn(TEXT)))


@model
def diffusers_unet_of_motion() -> Sample:
    net = of_diffusers(
        "UNetMotionModel",
        norm_num_groups=8,
        num_attention_heads=2,
        motion_num_attention_heads=2,
        **blocks("", "Motion"),
        **UNET,
    )
    return Sample(net, (torch.randn(1, 4, 3, 16, 16), TIME, torch.randn(3, 5, 24)))


@model
def diffusers_stable_video() -> Sample:
    net = of_diffusers(
        "UNetSpatioTemporalConditionModel",
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=2,
        **blocks("", "SpatioTemporal"),
        **UNET,
    )
    image = torch.randn(1, 2, 8, 16, 16)
    return Sample(net, (image, TIME, torch.randn(1, 1, 24), torch.randn(1, 3)))


@model
def diffusers_kandinsky() -> Sample:
    net = of_diffusers(
        "Kandinsky3UNet",
        time_embedding_dim=32,
        groups=4,
        attention_head_dim=16,
        layers_per_block=2,
        block_out_channels=(32, 64),
        cross_attention_dim=24,
        encoder_hid_dim=24,
    )
    text = torch.randn(TEXT)
    return Sample(net, (torch.randn(1, 4, 16, 16), TIME, text, torch.ones(1, 5)))


@model
def diffusers_vae() -> Sample:
    net = of_diffusers(
        "AutoencoderKL",
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    return Sample(net, (torch.randn(2, 3, 32, 32),))


@model
def diffusers_vae_of_videos() -> Sample:
    net = of_diffusers(
        "AutoencoderKLCogVideoX",
        block_out_channels=(16, 32),
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=2,
        sample_height=32,
        sample_width=32,
    )
    return Sample(net, (torch.randn(1, 3, 5, 16, 16),))


# -- timm ----------------------------------------------------------------------------------------


def of_timm(name: str, size: int = 64, **options: Any) -> Sample:
    timm = pytest.importorskip("timm")
    return Sample(
        timm.create_model(name, num_classes=5, **options), (torch.randn(2, 3, size, size),)
    )


@model
def timm_resnet() -> Sample:
    layers = pytest.importorskip("timm.layers")
    return of_timm("resnet10t", norm_layer=partial(layers.GroupNorm, num_groups=8))


@model
def timm_efficientnet() -> Sample:
    return of_timm("efficientnet_b0_gn")


@model
def timm_poolformer() -> Sample:
    return of_timm("poolformer_s12")


# -- torchvision ---------------------------------------------------------------------------------


class OfBatches(nn.Module):
    """A detector, which takes a list of images and their targets."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor, boxes: Tensor) -> Any:
        labels = torch.ones(len(boxes), dtype=torch.int64, device=boxes.device)
        targets = [{"boxes": boxes.float(), "labels": labels}] * len(images)
        return self.detector(list(images), targets if self.training else None)


@model
def torchvision_fcos() -> Sample:
    """A detector whose heads have norms: one for feature maps of all sizes."""
    pytest.importorskip("torchvision")
    from torchvision.models import resnet
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    body = resnet.ResNet(
        resnet.BasicBlock, [1, 1, 1, 1], norm_layer=lambda channels: nn.GroupNorm(16, channels)
    )
    backbone = _resnet_fpn_extractor(body, 5, returned_layers=[2, 3, 4])
    sizes = ((8,), (16,), (32,), (64,))
    anchors = AnchorGenerator(sizes, ((1.0,),) * len(sizes))
    detector = FCOS(
        backbone, 3, min_size=96, max_size=128, score_thresh=1e-3, anchor_generator=anchors
    )
    boxes = torch.tensor([[4.0, 5.0, 60.0, 70.0], [20.0, 20.0, 80.0, 90.0]])
    return Sample(OfBatches(detector), (torch.rand(2, 3, 96, 96), boxes))


# -- transformers --------------------------------------------------------------------------------


@model
def transformers_big_transfer() -> Sample:
    transformers = pytest.importorskip("transformers")
    config = transformers.BitConfig(
        embedding_size=32, hidden_sizes=[32, 64, 64, 128], depths=[1, 1, 1, 1], num_groups=8
    )
    return Sample(transformers.BitModel(config), (torch.randn(2, 3, 64, 64),))


@model
def transformers_mask2former() -> Sample:
    transformers = pytest.importorskip("transformers")
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=stages,
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=48,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=48,
        num_queries=5,
        num_labels=4,
    )
    net = transformers.Mask2FormerForUniversalSegmentation(config)
    return Sample(net, (torch.randn(2, 3, 64, 64),))


# -- tests ---------------------------------------------------------------------------------------


def laid_out(tensor: Tensor) -> Tensor:
    """Channels-last, if it is an image, a video or the weight of their convolutions."""
    return lay_out(tensor, "channels_last") if tensor.dim() in (4, 5) else tensor


@pytest.fixture(params=MODELS)
def sample(request: pytest.FixtureRequest, device: str) -> Sample:
    """A model on the device, whose norms have parameters other than ones and zeros."""
    net, inputs = MODELS[request.param]()
    for module in randomised(net, weight=1, deviation=0.1).modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.modules.conv._ConvNd):  # not all of float64 keep the layout
            module.register_forward_hook(lambda module, args, out: laid_out(out))
    return Sample(net.to(device), tree_map(lambda tensor: tensor.to(device), inputs))


def outputs_of(sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    """All floating-point tensors of its output, in that type."""

    def prepare(tensor: Tensor) -> Tensor:
        return laid_out(tensor.to(dtype)) if tensor.is_floating_point() else tensor

    net, inputs = sample
    net.to(dtype)
    for parameter in net.parameters():
        parameter.data = laid_out(parameter.data)
    leaves = tree_leaves(net(*tree_map(prepare, inputs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def train(sample: Sample, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of a training step, and the gradient of each parameter that has one."""
    net = sample.model.train()
    net.zero_grad()
    torch.manual_seed(0)  # a VAE draws, and the loss weighs outputs at random
    outputs = outputs_of(sample, dtype)
    weights = [torch.randn(out.shape, device="cpu").to(out) for out in outputs]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return [out.detach() for out in outputs], gradients


def assert_agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """To what float64 leaves of rounding: relative to a tensor's largest element, and to that of
    all, since some gradients are 0 but for rounding."""
    largest = max(float(value.abs().max()) for value in theirs)
    for place, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
        limit = 1e-8 * float(value.abs().max()) + 1e-12 * largest
        error = max_error(mine, value)
        assert error <= limit, f"{place}: {error:.3e} exceeds {limit:.3e}"


def test_training(sample: Sample, device: str) -> None:
    with override_off():
        outputs, gradients = train(sample, torch.float64)
    torch.ops.gn_override.reset_counters()
    our_outputs, our_gradients = train(sample, torch.float64)
    assert calls(FORWARD, device)[0] > 0
    assert calls(BACKWARD, device)[0] > 0
    assert_agree(our_outputs, outputs)
    assert our_gradients.keys() == gradients.keys()
    assert_agree([*our_gradients.values()], [*gradients.values()])


def test_float32(sample: Sample, device: str) -> None:
    """Outputs of a training step. Not gradients: where a relu's input is 0 but for rounding, they
    jump, with the override or without it."""
    with override_off():
        exact, _ = train(sample, torch.float64)
        theirs, _ = train(sample, torch.float32)
    torch.ops.gn_override.reset_counters()
    ours, _ = train(sample, torch.float32)
    assert calls(FORWARD, device)[0] > 0

    def error(values: list[Tensor]) -> float:
        pairs = zip(values, exact, strict=True)
        return statistics.median(
            max_error(value, truth) / float(truth.abs().max()) for value, truth in pairs
        )

    assert error(ours) <= 2 * error(theirs) + torch.finfo(torch.float32).eps


@torch.no_grad()
def test_fused_inference(sample: Sample) -> None:
    """fuse() changes no output."""
    net = sample.model.eval()

    def outputs() -> list[Tensor]:
        torch.manual_seed(0)
        return outputs_of(sample, torch.float64)

    with override_off():
        theirs = outputs()
    gn_override.fuse(net)
    assert_agree(outputs(), theirs)
