"""Triton kernels, installed as `rlkernels.triton_kernels`.

vLLM takes any top-level module named `triton_kernels` for OpenAI's.
"""
