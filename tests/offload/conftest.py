"""What the tests of offloading have in common with those of communicators: ranks."""

from comm.ranks import pool, pools, ranks_end  # noqa: F401
