"""What the tests of communicators have in common."""

from ranks import fake_gpus, fake_vmm, gpus, hosts, pool, pools, ranks_end, some  # noqa: F401
