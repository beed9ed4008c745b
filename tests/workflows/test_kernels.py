"""Kernels by what they do, told by their names."""

from __future__ import annotations

import pytest
import torch

from flatrock.workflows.kernels import AROUND, KINDS, kernel_ms, kind_of

NAMES = {
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_execute": "convolutions",
    "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64": "convolutions",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_256x64_32x4": "convolutions",
    "void convolve_common_engine_float_NHWC<__nv_bfloat16, __nv_bfloat16, 128, 5, 5>": "convolutions",
    "void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, true>": "convolutions",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "matrix products",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32x64": "matrix products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align2>": "matrix products",
    "_forward": "normalisation and ReLU",
    "_backward": "normalisation and ReLU",
    "triton_poi_fused__native_batch_norm_legit_functional_relu_5": "normalisation and ReLU",
    "triton_red_fused__native_batch_norm_legit_functional_native_batch_norm_backward": "normalisation and ReLU",
    "triton_red_fused__native_batch_norm_legit_functional__to_copy_copy__relu_0": "normalisation and ReLU",
    "triton_poi_fused__to_copy_convolution_backward_native_batch_norm_backward_3": "normalisation and ReLU",
    "void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half>": "normalisation and ReLU",
    "_moments": "normalisation and ReLU",
    "_merge_moments": "normalisation and ReLU",
    "_grad_moments": "normalisation and ReLU",
    "_merge_grads": "normalisation and ReLU",
    "triton_poi_fused__to_copy_add_mul_relu_view_16": "normalisation and ReLU",
    "triton_poi_fused__to_copy_add_convolution_backward_div_le_mul_neg_scalar_tensor_sub_view_where_39": (
        "normalisation and ReLU"
    ),
    "triton_poi_fused__to_copy_29": "copies",
    "triton_poi_fused_convolution_mul_2": "other",
    "Memset (Device)": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "other",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgd>": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=[n[:40] for n in NAMES])
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert not AROUND.search(name)


@pytest.mark.parametrize("name", ["## Call CompiledFxGraph abc ##", "Optimizer.step#SGD.step", "aten::_foreach_copy_"])
def test_what_is_drawn_around_kernels_is_not_counted(name: str) -> None:
    assert AROUND.search(name)


@pytest.mark.gpu
def test_a_matrix_product_is_one() -> None:
    a = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    spent = kernel_ms(lambda: [torch.mm(a, a) for _ in range(5)], steps=5)
    assert list(spent) == list(KINDS)
    assert spent["matrix products"] > 0.05
    assert sum(spent.values()) < 2 * spent["matrix products"]
