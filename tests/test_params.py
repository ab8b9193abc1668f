"""A kernel's Params: declared or read in the source, compared by the compiler, used by a launch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from needs import needs_nvrtc
from tiny import SM_90

from jitkern.arch import SUPPORTED_ARCHS, Arch
from jitkern.errors import CompileError
from jitkern.jit.loader import load_jit
from jitkern.jit.params import parse_params, read_params

MEMBERS = """
template <int N> struct Members {
  struct Params {
    float* __restrict__ data; const float4* vecs; double factor; bool flag; signed char small;
    int n; long long count; const void* any; unsigned short* raw;
  };
  static constexpr int kNumThreads = N, kMinBlocks = 1;
  static __device__ void run(const Params&) {}
};
"""
DECLARED = (
    "float* data, const float* vecs, double factor, bool flag, int8 small, int n, int64 count, "
    "const void* any, strided bfloat16 *raw"
)


def members(declared: str) -> Any:
    Path("members.cu").write_text(MEMBERS)
    wrappers = [("members", "Members<32>", declared)]
    return load_jit("members", "32", device_files=["members.cu"], device_wrappers=wrappers)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("float* x", "float32* x"),
        ("strided const __half* x", "float16* x"),
        ("void*x", "void* x"),
        ("float8_e4m3fn  *x", "float8_e4m3fn* x"),
        ("long  long x", "int64 x"),
        ("unsigned x", "uint32 x"),
        ("int16_t x", "int16 x"),
    ],
)
def test_a_declaration(text: str, shown: str) -> None:
    (param,) = parse_params("k", text)
    assert (str(param), param.is_strided) == (shown, "strided" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'', expected TYPE NAME or TYPE\* NAME, such as float\* data, int64 count"),
        ("float** x", r"'float\*\* x', expected TYPE NAME or .*"),
        ("float x[4]", r"'float x\[4\]', expected TYPE NAME or .*"),
        ("int y, float33 x", r"'float33 x', expected a dtype of torch \(float32, .* or void"),
        ("half x", r"'half x', expected a number of 1 to 8 bytes, or a pointer: TYPE\* NAME"),
        ("strided int x", "'strided int x', expected strided in front of a pointer only"),
    ],
)
def test_what_is_no_declaration_is_quoted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^load_jit: device_wrappers: k: {message}$"):
        parse_params("k", text)


@needs_nvrtc
def test_the_compiler_finds_the_struct_as_declared(folder: Path) -> None:
    assert members(DECLARED).image(SM_90).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("double factor", "float factor", "taken as float32 factor, but Params has another type"),
        ("bool flag, int8 small", "int8 small, bool flag", "taken as float32* data, float32* vec"),
        (", strided bfloat16 *raw", "", "error: "),  # the compiler's own words
        ("int64 count", "int64 counts", 'has no member "counts"'),
    ],
)
def test_a_struct_that_is_not_as_declared_does_not_compile(
    folder: Path, right: str, wrong: str, message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        members(DECLARED.replace(right, wrong)).image(SM_90)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("float* a; double b; long long c;", "float32* a, float64 b, int64 c"),
        ("float* __restrict__ a; float const* b;", "float32* a, float32* b"),
        ("__half* a; const __nv_bfloat16* b; bool* c;", "float16* a, bfloat16* b, bool* c"),
        ("unsigned* a; char* b; T* c; float** d;", "void* a, void* b, void* c, void* d"),
        ("uint4* a;", "void* a"),
        ("i64 a; uint8_t c; bool d; size_t e;", "int64 a, uint8 c, bool d, uint64 e"),
        ("float a; // the first\n int b; /* and\n b */", "float32 a, int32 b"),
        ("mine::Shape* a;", "void* a"),
        # What is left to the compiler.
        *((members, "") for members in ("", "float a[4];", "half a;", "float& a;", "MEMBERS")),
        *((members, "") for members in ("static constexpr int kSize = 3; int a;", "Pair<int> a;")),
        *((members, "") for members in ("void (*a)(int);", "int a, b;", "\n#if X\nint a;\n")),
    ],
)
def test_members_that_are_plainly_written_are_read(members: str, expected: str) -> None:
    text = f"namespace mine {{ template <int N> struct Toy {{ struct Params {{ {members} }}; }}; }}"
    assert ", ".join(map(str, read_params("mine::Toy<3>", [text]))) == expected


@pytest.mark.parametrize(
    ("template", "kernel", "dtype"),
    [
        ("typename T, int N", "Toy<float, 4>", "float32"),
        ("int N, class T", "mine::Toy<4, __half>", "float16"),
        ("class T, class U = int", "Toy<Pair<int, 2>>", "void"),
    ],
)
def test_a_type_of_the_template_arguments_is_known(template: str, kernel: str, dtype: str) -> None:
    """A launch with a tensor of another dtype read other numbers."""
    text = f"template <{template}> struct Toy {{ struct Params {{ T* a; const T* b; int c; }}; }};"
    shown = ", ".join(map(str, read_params(kernel, [text])))
    assert shown == f"{dtype}* a, {dtype}* b, int32 c"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("struct Other { struct Params { int a; }; };", "another class"),
        ("struct Toy; struct Toys { struct Params { int a; }; };", "declared only"),
        ("struct Toy { struct Params { int a; }; }; struct Toy<3> { };", "specialised"),
        ("struct Base { int a; }; struct Toy { struct Params : Base { int b; }; };", "a base"),
        ("struct Shape { int a; }; struct Toy { using Params = Shape; };", "an alias"),
        ("// struct Toy { struct Params { int a; }; };", "a comment"),
        ("struct Toy { struct Params { int a; }", "not closed"),
        ("#pragma pack(1)\nstruct Toy { struct Params { int a; }; };", "packed"),
    ],
)
def test_what_is_not_plain_is_not_read(text: str, why: str) -> None:
    assert read_params("Toy<3>", [text]) == (), why


KERNEL = """
struct Kernel {
  struct Params { bool flag; int count; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params&) {}
};
"""


def kernel(before: str, **more: Any) -> Any:
    Path("kernel.cu").write_text(f"{before}\n{KERNEL}")
    wrappers = [("kernel", "Kernel")]
    return load_jit("kernel", device_files=["kernel.cu"], device_wrappers=wrappers, **more)


@needs_nvrtc
@pytest.mark.parametrize(
    ("before", "flags"),
    [("", ["-lineinfo -std=c++11"]), ("#pragma pack(1)", []), ("#define SIZE 4", [])],
)
def test_what_is_read_is_no_obstacle(folder: Path, before: str, flags: list[str]) -> None:
    """A kernel that compiled before its Params were read failed in jitkern's own checks."""
    assert kernel(before, extra_cuda_cflags=flags).image(SM_90).startswith(b"\x7fELF")


@needs_nvrtc
def test_what_was_read_wrongly_says_to_declare_it(folder: Path) -> None:
    Path("odd.cuh").write_text("#define int long long\n")
    with pytest.raises(CompileError) as caught:
        kernel('#include "odd.cuh"').image(SM_90)
    assert (
        "kernel: taken as int32 count, but Params has another type or order; "
        "declare the parameters as the third item of device_wrappers"
    ) in caught.value.log


SIZES = """
template <int N, int kThreads> struct Sized {
  struct Params { float a[N]; int* b; };
  static constexpr int kNumThreads = kThreads;
  static __device__ void run(const Params& p) { *p.b = p.a[1]; }
};
struct AnyBlock {
  struct Params { int* b; };
  static __device__ void run(const Params& p) { *p.b = blockDim.x; }
};
"""


@needs_nvrtc
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
@pytest.mark.parametrize("arch", SUPPORTED_ARCHS[::2], ids=str)
def test_an_image_tells_the_threads_of_its_kernels(folder: Path, arch: Arch) -> None:
    Path("sized.cu").write_text(SIZES)
    wrappers = [("one", "Sized<4, 1000>"), ("two", "Sized<7000, 32>"), ("any", "AnyBlock")]
    image = load_jit("sized", device_files=["sized.cu"], device_wrappers=wrappers).image(arch)
    Path("sized.cubin").write_bytes(image)
    done = subprocess.run(["readelf", "-sW", "sized.cubin"], capture_output=True, text=True)
    sizes = {line.split()[-1]: line.split()[2] for line in done.stdout.splitlines()[3:]}
    found = [int(sizes[f"jitkern_threads_{name}"]) for name in ("one", "two", "any")]
    assert found == [1001, 33, 1]
