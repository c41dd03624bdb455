"""Builds `csrc/` with CMake into `rlkernels._native`; everything else is declared in pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / ext.name
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-G",
            "Ninja",
            # pip builds in a throw-away environment, so a cached path to ninja or pybind11 may be gone
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            "-DCMAKE_BUILD_TYPE=Release",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),  # -DRLK_CUDA=OFF, -DCMAKE_CUDA_ARCHITECTURES=90
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True)


setup(
    ext_modules=[Extension("rlkernels._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # Not a top-level package: vLLM takes any module named triton_kernels for OpenAI's.
    packages=[
        "rlkernels",
        "rlkernels.backends",
        "rlkernels.cli",
        "rlkernels.credit",
        "rlkernels.integrations",
        "rlkernels.integrations.nemo_rl",
        "rlkernels.integrations.slime",
        "rlkernels.integrations.trl",
        "rlkernels.integrations.verl",
        "rlkernels.ops",
        "rlkernels.triton_kernels",
    ],
    package_dir={"rlkernels": "rlkernels", "rlkernels.triton_kernels": "triton_kernels"},
    package_data={"rlkernels": ["py.typed", "_native.pyi"]},
)
