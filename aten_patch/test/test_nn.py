"""Cases for TestNNDeviceType of PyTorch's test/test_nn.py.

The body of the class below is staged. They also run by themselves, against any
PyTorch: python aten_patch/test/test_nn.py
"""

import os

import torch
import torch.nn.functional as F
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    largeTensorTest,
    onlyCUDA,
)
from torch.testing._internal.common_utils import TestCase, run_tests


class TestNNDeviceType(TestCase):
    def _check_GroupNorm_channels_last(self, input, groups, grad):
        # Output and gradients against those of float64 NCHW tensors, by the
        # largest value; output and dX must be in the input's layout. Backward,
        # the saved mean and rstd are rounded to the input's dtype.
        tolerance = {
            torch.double: 1e-12,
            torch.float: 2e-5,
            torch.half: 4e-3,
            torch.bfloat16: 3e-2,
        }[input.dtype]
        channels_last = (
            torch.channels_last if input.dim() == 4 else torch.channels_last_3d
        )
        weight = torch.randn(input.size(1), device=input.device).to(input.dtype)
        bias = torch.randn(input.size(1), device=input.device).to(input.dtype)
        leaves = [t.detach().requires_grad_() for t in (input, weight, bias)]
        output = F.group_norm(leaves[0], groups, *leaves[1:])
        output.backward(grad)

        exact = [t.detach().double().contiguous().requires_grad_() for t in leaves]
        expected = F.group_norm(exact[0], groups, *exact[1:])
        expected.backward(grad.double().contiguous())

        self.assertTrue(output.is_contiguous(memory_format=channels_last))
        self.assertTrue(leaves[0].grad.is_contiguous(memory_format=channels_last))
        pairs = [
            (output, expected),
            *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)),
        ]
        for actual, reference in pairs:
            error = (actual.double() - reference).abs().max() / reference.abs().max()
            self.assertLess(error.item(), tolerance)

    @onlyCUDA
    @dtypes(torch.float, torch.double, torch.half, torch.bfloat16)
    def test_GroupNorm_channels_last(self, device, dtype):
        for shape, groups in [
            ((2, 64, 8, 8), 32),
            ((3, 30, 9, 7), 3),  # no power of two
            ((2, 9, 5, 5), 9),  # one channel a group, no vectors
            ((2, 6, 5, 5), 1),
            ((2, 66, 5, 3), 2),
            ((129, 32, 4, 4), 4),
            ((2, 320, 32, 32), 32),
            ((1, 128, 96, 96), 32),  # few samples, many pixels
            ((1, 8, 300, 301), 4),
            ((2, 9, 7, 11, 15), 3),
            ((1, 64, 4, 24, 24), 32),
        ]:
            channels_last = (
                torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            )
            input = torch.randn(shape, device=device).to(dtype)
            input = input.contiguous(memory_format=channels_last)
            grad = torch.randn_like(input)
            self._check_GroupNorm_channels_last(input, groups, grad)

    @onlyCUDA
    def test_GroupNorm_channels_last_kernels(self, device):
        if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            self.skipTest("channels-last tensors have other kernels here")
        activity = torch.profiler.ProfilerActivity.CUDA
        if activity not in torch.profiler.supported_activities():
            self.skipTest("needs a profiler that sees kernels by name")
        inputs = []
        for shape, groups in [
            ((2, 64, 16, 16), 8),
            ((2, 320, 32, 32), 32),
            ((2, 9, 5, 5), 9),
        ]:
            input = torch.randn(shape, device=device).bfloat16()
            input = input.contiguous(memory_format=torch.channels_last).requires_grad_()
            inputs.append((input, groups))
        with torch.profiler.profile(activities=[activity]) as profile:
            for input, groups in inputs:
                output = F.group_norm(input, groups)
                output.backward(output)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events()]
        for kernels in (  # of each scheme
            ("registers_forward", "resident_forward", "combine_statistics"),
            ("registers_backward", "resident_backward", "gradient_sums"),
        ):
            found = [name for name in names if any(k in name for k in kernels)]
            self.assertEqual(len(found), len(inputs), msg=f"{kernels} in {found}")

    @onlyCUDA
    @dtypes(torch.float, torch.half)
    def test_GroupNorm_channels_last_large_mean(self, device, dtype):
        # The deviation is small against the mean: sums of squares would cancel.
        input = (torch.randn(2, 32, 24, 24, device=device) + 100).to(dtype)
        input = input.contiguous(memory_format=torch.channels_last)
        output = F.group_norm(input, 8)
        expected = F.group_norm(input.double().contiguous(), 8)
        self.assertEqual(output.double(), expected, atol=5e-3, rtol=5e-3)

    @onlyCUDA
    @dtypes(torch.float, torch.half, torch.bfloat16)
    def test_GroupNorm_channels_last_layouts_of_grad(self, device, dtype):
        shape = (2, 32, 12, 10)
        input = torch.randn(shape, device=device).to(dtype)
        input = input.contiguous(memory_format=torch.channels_last)
        grad = torch.randn(shape, device=device).to(dtype)
        for other in (
            grad,
            grad.contiguous(memory_format=torch.channels_last),
            grad.transpose(2, 3).contiguous().transpose(2, 3),
            grad[:, :, :1, :1].expand(shape),
        ):
            self._check_GroupNorm_channels_last(input, 8, other)

    @onlyCUDA
    @dtypes(torch.float, torch.half, torch.bfloat16)
    def test_GroupNorm_channels_last_unaligned_input(self, device, dtype):
        N, C, H, W = 2, 32, 12, 10
        for offset in (1, 2, 4):
            storage = torch.randn(N * C * H * W + offset, device=device).to(dtype)
            input = storage[offset:].view(N, H, W, C).permute(0, 3, 1, 2)
            self._check_GroupNorm_channels_last(input, 8, torch.randn_like(input))

    @onlyCUDA
    @dtypes(torch.float, torch.bfloat16)
    def test_GroupNorm_channels_last_repeats_bit_for_bit(self, device, dtype):
        input = torch.randn(2, 64, 40, 40, device=device).to(dtype)
        input = input.contiguous(memory_format=torch.channels_last).requires_grad_()
        weight = torch.randn(64, device=device).to(dtype).requires_grad_()
        grad = torch.randn_like(input)

        def run():
            output = F.group_norm(input, 32, weight)
            return (output, *torch.autograd.grad(output, (input, weight), grad))

        for first, second in zip(run(), run(), strict=True):
            self.assertEqual(first, second, atol=0, rtol=0)

    @onlyCUDA
    @dtypes(torch.float, torch.half)
    def test_GroupNorm_channels_last_wanted_gradients(self, device, dtype):
        # No gradient depends on which others are wanted.
        for shape, groups in [((2, 64, 16, 16), 8), ((3, 30, 9, 7), 3)]:
            input = torch.randn(shape, device=device).to(dtype)
            input = input.contiguous(memory_format=torch.channels_last)
            grad = torch.randn_like(input)
            weight, bias = torch.randn(2, shape[1], device=device).to(dtype)
            leaves = [t.detach().requires_grad_() for t in (input, weight, bias)]
            output = F.group_norm(leaves[0], groups, *leaves[1:])
            every = torch.autograd.grad(output, leaves, grad)
            for wanted in range(1, 7):
                for i, leaf in enumerate(leaves):
                    leaf.requires_grad_(bool(wanted >> i & 1))
                output = F.group_norm(leaves[0], groups, *leaves[1:])
                found = iter(
                    torch.autograd.grad(
                        output, [leaf for leaf in leaves if leaf.requires_grad], grad
                    )
                )
                for leaf, expected in zip(leaves, every, strict=True):
                    if leaf.requires_grad:
                        self.assertEqual(next(found), expected, atol=0, rtol=0)

    @onlyCUDA
    def test_GroupNorm_channels_last_in_cuda_graph(self, device):
        from torch.testing._internal.common_utils import TEST_CUDA_GRAPH

        if not TEST_CUDA_GRAPH:
            self.skipTest("needs CUDA graphs")

        def run(leaves, grad):
            output = F.group_norm(leaves[0], 32, *leaves[1:])
            return (output.detach(), *torch.autograd.grad(output, leaves, grad))

        for shape in [(2, 320, 32, 32), (1, 128, 256, 256)]:
            input, other, grad = (
                torch.randn(shape, device=device)
                .bfloat16()
                .contiguous(memory_format=torch.channels_last)
                for _ in range(3)
            )
            weight, bias = torch.randn(2, shape[1], device=device).bfloat16()
            leaves = [t.requires_grad_() for t in (input, weight, bias)]

            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run(leaves, grad)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run(leaves, grad)
            with torch.no_grad():
                input.copy_(other)
            for _ in range(2):
                graph.replay()
                for found, expected in zip(captured, run(leaves, grad), strict=True):
                    self.assertEqual(found, expected, atol=0, rtol=0)

    @onlyCUDA
    def test_GroupNorm_channels_last_whole_chip(self, device):
        import subprocess
        import sys

        # In a process of its own, as the variable is read once.
        script = """if True:
            import torch
            import torch.nn.functional as F

            operands = torch.randn(2, 2, 64, 256, 256, device="cuda").bfloat16()
            results = []
            for dtype, layout in (
                (torch.bfloat16, torch.channels_last),
                (torch.double, torch.contiguous_format),
            ):
                input, grad = (
                    operand.to(dtype).contiguous(memory_format=layout)
                    for operand in operands
                )
                input.requires_grad_()
                output = F.group_norm(input, 32)
                output.backward(grad)
                results.append((output.double(), input.grad.double()))
            for actual, expected in zip(*results, strict=True):
                error = (actual - expected).abs().max() / expected.abs().max()
                assert error < 3e-2, error
        """
        env = os.environ | {"TORCH_GROUP_NORM_WHOLE_CHIP": "1"}
        subprocess.run([sys.executable, "-c", script], env=env, check=True)

    @onlyCUDA
    @largeTensorTest("24GB", device="cuda")
    def test_GroupNorm_channels_last_64bit_indexing(self, device):
        C, G, D, H, W = 128, 32, 4, 16128, 1200  # more than 2^31 elements
        input = torch.randn(1, H, W, C, device=device, dtype=torch.bfloat16).permute(
            0, 3, 1, 2
        )
        grad = torch.ones((), device=device, dtype=torch.bfloat16).expand_as(input)
        output, mean, rstd = torch.native_group_norm(
            input, None, None, 1, C, H * W, G, 1e-5
        )
        group = input[:, -D:].float()
        expected = (group - group.mean()) * torch.rsqrt(group.var(correction=0) + 1e-5)
        self.assertEqual(output[:, -D:].float(), expected, atol=2e-2, rtol=1e-2)
        del group, expected, output
        # A constant gradient: nothing of it reaches the input.
        dX, _, dbeta = torch.ops.aten.native_group_norm_backward(
            grad, input, mean, rstd, None, 1, C, H * W, G, [True, False, True]
        )
        self.assertEqual(dX[:, -D:].abs().max().item(), 0, atol=1e-2, rtol=0)
        self.assertEqual(dbeta.float(), torch.full_like(dbeta, H * W).float())


instantiate_device_type_tests(TestNNDeviceType, globals())

if __name__ == "__main__":
    run_tests()
