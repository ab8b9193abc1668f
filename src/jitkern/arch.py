"""GPU architectures by compute capability: the known ones, and those to compile for."""

import re
from typing import NamedTuple

from jitkern.env import settings
from jitkern.errors import ToolchainError

_TEXT = re.compile(r"(?:(?:sm|compute)_)?([0-9]{1,3})\.?([0-9])([af]?)")


class Arch(NamedTuple):
    """The architecture of a GPU: its compute capability, which may be newer than jitkern.

    `suffix`: ``a`` for code of exactly this architecture, ``f`` for its family, empty for code that
    later minor versions run too.

    Examples
    --------
    >>> Arch(9, 0).sm, Arch(10, 0, "a").compute, str(Arch(8, 6))
    ('sm_90', 'compute_100a', '8.6')
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> "Arch":
        """Read ``9.0``, ``9``, ``90``, ``sm_90``, ``compute_90`` or ``9.0a``, of a known one."""
        return cls._parse("arch", text)

    @classmethod
    def _parse(cls, argument: str, text: str) -> "Arch":
        if not isinstance(text, str):
            raise TypeError(f"{argument}: {text!r}, expected a str such as '9.0'")
        spelled = text.strip()
        if spelled in {str(arch.major) for arch in KNOWN_ARCHS}:
            spelled += ".0"
        match = _TEXT.fullmatch(spelled)
        if match is not None:
            plain = cls(int(match[1]), int(match[2]))
            if plain in KNOWN_ARCHS and plain >= _SUFFIX_SINCE[match[3]]:
                return plain._replace(suffix=match[3])
        # 7.5 is left out: jitkern's own kernels need 8.0.
        known = ", ".join(str(arch) for arch in KNOWN_ARCHS if arch >= SUPPORTED_ARCHS[0])
        raise ValueError(
            f"{argument}: {text!r}, expected one of {known} "
            "(with a from 9.0 on or f from 10.0 on, such as 9.0a, 10.0f)"
        )

    @property
    def number(self) -> int:
        """major * 10 + minor, as in ``__CUDA_ARCH__`` / 10."""
        return self.major * 10 + self.minor

    @property
    def sm(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        return f"compute_{self.number}{self.suffix}"

    @property
    def _lower_minors(self) -> tuple["Arch", ...]:
        """The archs whose cubins run here as well: same major, lower minor, the nearest first."""
        if self.suffix or self in _TEGRA:
            return ()
        lower = [arch for arch in KNOWN_ARCHS if Arch(self.major, 0) <= arch < self]
        return tuple(arch for arch in reversed(lower) if arch not in _TEGRA)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"


KNOWN_ARCHS = tuple(
    Arch(*divmod(n, 10)) for n in (75, 80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121)
)
"""What nvcc 13.0 and NVRTC 13.5 compile for; `Arch.parse` accepts these, also with a suffix."""

# CUDA promises no binary compatibility between desktop GPUs and Tegra.
_TEGRA = (Arch(8, 7), Arch(8, 8))

_SUFFIX_SINCE = {"": Arch(7, 5), "a": Arch(9, 0), "f": Arch(10, 0)}

SUPPORTED_ARCHS = (Arch(8, 0), Arch(9, 0), Arch(10, 0), Arch(12, 0))
"""All kernels of jitkern's own are tested for these: one of each generation in service."""


def requested_archs() -> tuple[Arch, ...]:
    """Return the archs of ``JITKERN_ARCH``; ValueError for an unknown one."""
    return tuple(Arch._parse("JITKERN_ARCH", text) for text in settings().arch)


def gpu_archs() -> list[Arch]:
    """Return the arch of each GPU that torch sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [Arch(*torch.cuda.get_device_capability(i)) for i in range(count)]


def target_archs() -> tuple[Arch, ...]:
    """Return the arch of the GPU here, else all of JITKERN_ARCH; ToolchainError without either."""
    import torch

    if torch.cuda.is_available():
        return (Arch(*torch.cuda.get_device_capability()),)
    wanted = requested_archs()
    if not wanted:
        raise ToolchainError(
            "there is no GPU to compile CUDA code for; set JITKERN_ARCH, such as JITKERN_ARCH=9.0"
        )
    return tuple(dict.fromkeys(wanted))
