"""The one list of shapes: for the tests, the benchmarks, the README and the upstream text.

Nothing here needs torch, so that tools can read the list without it. Dtypes are strings as in
`torch.float32`'s name; `getattr(torch, case.dtype)` gives the dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Elements that a CPU test may use: at this size forward, backward, stock's own run and the fp64
# reference together take about 0.1 s on two cores.
CPU_NUMEL = 1 << 20


@dataclass(frozen=True)
class Case:
    """One call of group normalisation.

    name    short, unique together with the dtype
    shape   (N, C, *spatial), whatever the memory layout
    groups  G
    dtype   of the input, where a table measures one; tests that loop over dtypes ignore it
    """

    name: str
    shape: tuple[int, ...]
    groups: int = 32
    dtype: str = "float32"

    @property
    def N(self) -> int:
        return self.shape[0]

    @property
    def C(self) -> int:
        return self.shape[1]

    @property
    def HxW(self) -> int:
        return math.prod(self.shape[2:])

    @property
    def G(self) -> int:
        return self.groups

    @property
    def D(self) -> int:
        return self.C // self.groups

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def fits_cpu(self) -> bool:
        """Small enough for the CPU suite."""
        return self.numel <= CPU_NUMEL

    @property
    def one_layout(self) -> bool:
        """Channels-last and NCHW are the same memory: such a call counts as NCHW."""
        return self.C == 1 or self.HxW == 1

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} G={self.groups}"


def _rows(dtype: str, *rows: tuple[str, tuple[int, ...]]) -> tuple[Case, ...]:
    return tuple(Case(name, shape, 32, dtype) for name, shape in rows)


# The GPU benchmark table: diffusion UNets (sd15*, sdxl*), VAE decoders, maps of a ResNet-50 with
# GroupNorm (rn*), the shapes of earlier upstream pull requests (pr*), a detection head, video.
KERNEL_CASES: tuple[Case, ...] = _rows(
    "bfloat16",
    ("sd15", (2, 320, 64, 64)),
    ("sd15b", (2, 640, 32, 32)),
    ("sd15c", (2, 1280, 16, 16)),
    ("sd15d", (2, 2560, 8, 8)),
    ("sdxl", (2, 320, 128, 128)),
    ("sdxl2", (2, 640, 64, 64)),
    ("sdxl3", (2, 1280, 32, 32)),
    ("vae", (1, 128, 1024, 1024)),
    ("vae2", (1, 256, 512, 512)),
    ("vae3", (1, 512, 128, 128)),
    ("pr1", (128, 256, 28, 28)),
    ("pr2", (256, 512, 56, 56)),
    ("rn1", (64, 64, 112, 112)),
    ("rn2", (64, 256, 56, 56)),
    ("rn3", (64, 512, 28, 28)),
    ("rn4", (64, 1024, 14, 14)),
    ("rn5", (64, 2048, 7, 7)),
    ("det", (2, 256, 200, 272)),
    ("unet3d", (16, 320, 64, 64)),
) + _rows(
    "float32",
    ("sd15", (2, 320, 64, 64)),
    ("vae", (1, 128, 1024, 1024)),
    ("pr1", (128, 256, 28, 28)),
    ("pr2", (256, 512, 56, 56)),
    ("rn2", (64, 256, 56, 56)),
)

_CPU_ROWS = (
    ("cpu1", (2, 320, 64, 64)),
    ("cpu2", (1, 128, 256, 256)),
    ("cpu3", (16, 256, 28, 28)),
    ("cpu4", (8, 64, 112, 112)),
    ("cpu5", (128, 256, 28, 28)),
)

# The CPU benchmark table.
CPU_CASES: tuple[Case, ...] = _rows("float32", *_CPU_ROWS) + _rows("bfloat16", *_CPU_ROWS)


def _family(
    name: str,
    N: int,
    maps: dict[tuple[int, ...], tuple[int, ...]],
    groups: int = 32,
    dtype: str = "bfloat16",
) -> tuple[Case, ...]:
    """Cases `name_C_spatial` of one network: its channel counts by map size."""
    return tuple(
        Case(f"{name}_{C}_{'x'.join(map(str, spatial))}", (N, C, *spatial), groups, dtype)
        for spatial, channels in maps.items()
        for C in channels
    )


# Shapes that published models use.
MODEL_CASES: tuple[Case, ...] = (
    # Stable Diffusion 1.5 UNet, 512x512 images, classifier-free guidance
    *_family(
        "sd15_unet",
        2,
        {
            (64, 64): (320, 640, 960),
            (32, 32): (320, 640, 960, 1280, 1920),
            (16, 16): (640, 1280, 1920, 2560),
            (8, 8): (1280, 2560),
        },
    ),
    # SDXL UNet, 1024x1024 images
    *_family(
        "sdxl_unet",
        2,
        {
            (128, 128): (320, 640, 960),
            (64, 64): (320, 640, 960, 1280, 1920),
            (32, 32): (640, 1280, 1920, 2560),
        },
    ),
    # VAE decoders of SD, SDXL and Flux, 1024x1024 images
    *_family(
        "vae_decoder",
        1,
        {
            (128, 128): (512,),
            (256, 256): (512,),
            (512, 512): (512, 256),
            (1024, 1024): (256, 128),
        },
    ),
    # DDPM on CIFAR-10
    *_family(
        "ddpm",
        128,
        {(32, 32): (128, 256), (16, 16): (256, 512), (8, 8): (256, 512), (4, 4): (256, 512)},
    ),
    # guided diffusion trains and samples in fp32
    *_family(
        "guided",
        4,
        {
            (256, 256): (256,),
            (128, 128): (256, 512),
            (64, 64): (512,),
            (32, 32): (512, 1024),
            (16, 16): (1024,),
            (8, 8): (1024, 2048),
        },
        dtype="float32",
    ),
    # ResNet-50 with GroupNorm, 224x224 images
    *_family(
        "resnet50_gn",
        32,
        {
            (112, 112): (64,),
            (56, 56): (64, 256),
            (28, 28): (128, 512),
            (14, 14): (256, 1024),
            (7, 7): (512, 2048),
        },
    ),
    # BiT R101x3: groups of up to 192 channels
    *_family(
        "bit_r101x3",
        8,
        {(56, 56): (192, 768), (28, 28): (1536,), (14, 14): (3072,), (7, 7): (6144,)},
    ),
    # detection: feature pyramid, then heads over regions of interest
    *_family(
        "fpn",
        2,
        {(200, 336): (256,), (100, 168): (256,), (50, 84): (256,), (25, 42): (256,)},
    ),
    *_family("roi", 512, {(14, 14): (256,), (7, 7): (256,)}),
    # DETR's mask head
    *_family(
        "detr",
        2,
        {(25, 34): (264, 128), (50, 67): (64,), (100, 134): (32,), (200, 267): (16,)},
        groups=8,
        dtype="float32",
    ),
    # 3-D segmentation (MONAI, nnU-Net): few channels, and one channel a group
    *_family("seg3d", 1, {(96, 96, 96): (32,), (48, 48, 48): (64,)}, groups=8),
    Case("seg3d_instance_32_128x128x128", (1, 32, 128, 128, 128), 32, "bfloat16"),
    Case("seg3d_instance_320_6x6x6", (2, 320, 6, 6, 6), 320, "bfloat16"),
    # video VAE decoder
    *_family(
        "video_vae", 1, {(17, 480, 848): (128,), (17, 240, 424): (256,), (5, 60, 106): (512,)}
    ),
    # attention blocks see [N, C, L]
    *_family("attention", 2, {(4096,): (320,), (1024,): (640,), (256,): (1280,)}),
)

# What broke group normalisation before: odd group widths and map sizes, tiny and many groups,
# every rank. All fit the CPU.
EDGE_CASES: tuple[Case, ...] = (
    # D: one channel a group, not a power of two, wider than a vector, all channels
    Case("d1", (2, 32, 7, 9), 32),
    Case("d2", (2, 64, 14, 14), 32),
    Case("d3", (2, 96, 8, 10), 32),
    Case("d6", (3, 48, 11, 7), 8),
    Case("d10", (2, 320, 9, 9), 32),
    Case("d33", (2, 66, 10, 10), 2),
    Case("d42", (2, 84, 6, 6), 2),
    Case("d192", (1, 768, 5, 5), 4),
    Case("g1", (3, 24, 9, 5), 1),
    Case("g1_wide", (2, 1000, 6, 7), 1),
    # C: no multiple of any vector width
    Case("c9", (2, 9, 7, 11), 3),
    Case("c30", (2, 30, 9, 9), 3),
    Case("c60", (2, 60, 50, 50), 3),
    Case("c30_big", (2, 30, 50, 50), 3),
    Case("c7", (3, 7, 13, 5), 7),
    Case("c130", (2, 130, 6, 5), 13),
    Case("c2", (4, 2, 16, 16), 2),
    Case("c3_g1", (4, 3, 16, 16), 1),
    # HxW
    Case("hw2", (3, 32, 1, 2), 8),
    Case("hw3", (3, 32, 3, 1), 8),
    Case("hw49", (4, 256, 7, 7), 32),
    Case("hw3350", (1, 64, 50, 67), 32),
    Case("hw_prime", (1, 32, 1, 4099), 8),
    Case("w1", (2, 40, 33, 1), 4),
    Case("h1", (2, 40, 1, 33), 4),
    # N
    Case("n1", (1, 40, 40, 40), 2),
    Case("n129", (129, 32, 4, 4), 4),
    Case("n256", (256, 64, 4, 4), 8),
    Case("n512", (512, 128, 4, 4), 32),
    Case("n1024", (1024, 32, 5, 5), 32),
    Case("n_odd", (67, 48, 3, 3), 16),
    # rank: [N, C, L], volumes
    Case("ncl", (2, 64, 77), 32),
    Case("ncl_l2", (5, 24, 2), 3),
    Case("volume", (2, 9, 7, 11, 15), 3),
    Case("volume_flat", (2, 9, 7, 40, 15), 3),
    Case("volume_c60", (1, 60, 5, 8, 9), 3),
    Case("volume_t1", (2, 32, 1, 6, 6), 8),
    # larger: several tiles in every direction
    Case("tiles", (2, 320, 32, 32), 32),
    Case("tiles_deep", (1, 2560, 8, 8), 32),
    Case("tiles_map", (1, 64, 96, 96), 32),
    # channels-last and NCHW at once: these go to aten, and must still agree with it
    Case("hw1", (4, 32, 1, 1), 8),
    Case("hw1_ambiguous", (2048, 384, 1, 1), 32),
    Case("one_element", (6, 16, 1, 1), 16),
    Case("c1", (3, 1, 8, 8), 1),
    Case("nc", (64, 512), 32),
    Case("single_pixel", (1, 64, 1, 1), 8),
)

# Empty batches, apart since they have no statistics to compare.
EMPTY_CASES: tuple[Case, ...] = (
    Case("n0", (0, 4, 2, 2), 2),
    Case("n0_volume", (0, 16, 3, 2, 4), 4),
    Case("n0_ncl", (0, 16, 5), 4),
)

# More elements than a 32-bit index holds; only on a GPU with the memory for it.
LARGE_CASES: tuple[Case, ...] = (Case("past_2_31", (1, 128, 16128, 1200), 32, "bfloat16"),)

# X alone is more than the multiprocessors of an H200 can keep, in every dtype.
LARGER_THAN_CHIP = Case("larger_than_chip", (6, 48, 251, 257), 8)


def cpu_subset(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases of a table that fit the CPU suite."""
    return tuple(case for case in cases if case.fits_cpu)
