"""What of a kernel's ``Params`` is read in its source, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs_nvrtc
from tiny import SM_90

from jitkern.errors import CompileError
from jitkern.jit.loader import load_jit
from jitkern.jit.params import read_params


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("float* a; double b; long long c;", "float32* a, float64 b, int64 c"),
        ("const float *a, *b; int c, d;", "float32* a, float32* b, int32 c, int32 d"),
        ("float* __restrict__ a; float const* b;", "float32* a, float32* b"),
        ("__half* a; const __nv_bfloat16* b; bool* c;", "float16* a, bfloat16* b, bool* c"),
        (
            "unsigned* a; char* b; uint4* c; T* d; float** e;",
            "void* a, void* b, void* c, void* d, void* e",
        ),
        (
            "i64 a; unsigned long long b; uint8_t c; bool d; size_t e;",
            "int64 a, uint64 b, uint8 c, bool d, uint64 e",
        ),
        ("float a; // the first\n int b; /* and\n b */", "float32 a, int32 b"),
        ("mine::Shape* a;", "void* a"),
        # What is left to the compiler.
        ("", ""),
        ("float a[4];", ""),
        ("half a;", ""),
        ("float& a;", ""),
        ("static constexpr int kSize = 3; int a;", ""),
        ("Pair<int> a;", ""),
        ("void (*a)(int);", ""),
        ("MEMBERS", ""),
        ("\n#if X\nint a;\n#endif\n", ""),
    ],
)
def test_members_that_are_plainly_written_are_read(members: str, expected: str) -> None:
    text = f"namespace mine {{ template <int N> struct Toy {{ struct Params {{ {members} }}; }}; }}"
    assert ", ".join(map(str, read_params("mine::Toy<3>", [text]))) == expected


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
        ("# define a (c)\nstruct Toy { struct Params { int a; }; };", "a macro"),
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


@needs_nvrtc
@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ("", ["-lineinfo -std", "c++11"]),
        ("#pragma pack(1)", []),
        ("#define int long long", []),
    ],
)
def test_what_is_read_is_no_obstacle(folder: Path, before: str, flags: list[str]) -> None:
    """A kernel that compiled before its Params were read failed in jitkern's own checks."""
    Path("kernel.cu").write_text(f"{before}\n{KERNEL}")
    module = load_jit(
        "kernel",
        device_files=["kernel.cu"],
        device_wrappers=[("kernel", "Kernel")],
        extra_cuda_cflags=flags,
    )
    assert module.image(SM_90).startswith(b"\x7fELF")


@needs_nvrtc
def test_what_was_read_wrongly_says_to_declare_it(folder: Path) -> None:
    Path("odd.cuh").write_text("#define int long long\n")
    Path("kernel.cu").write_text(f'#include "odd.cuh"\n{KERNEL}')
    wrappers = [("kernel", "Kernel")]
    with pytest.raises(CompileError) as caught:
        load_jit("kernel", device_files=["kernel.cu"], device_wrappers=wrappers).image(SM_90)
    assert (
        "kernel: taken as int32 count, but Params has another type or order; "
        "declare the parameters as the third item of device_wrappers"
    ) in caught.value.log
