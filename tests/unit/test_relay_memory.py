"""The limit of a container counts, whatever kind of cgroup sets it."""

from pathlib import Path

from laminar.relay.memory import available_bytes, gib

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path / "nowhere") > 64 * MIB


def test_the_tightest_level_of_a_v2_hierarchy_counts(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/pod/box\n")
    root = tmp_path / "cgroup"
    write(root, memory__max="max")
    write(
        root / "pod", memory__max=90 * MIB, memory__current=60 * MIB, memory__stat=f"anon 1\ninactive_file {10 * MIB}"
    )
    write(root / "pod" / "box", memory__max=80 * MIB, memory__current=10 * MIB)
    assert available_bytes(root, tmp_path / "self") == 40 * MIB


def test_a_v1_limit_counts_even_if_only_the_mount_shows_it(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n")
    stat = f"total_inactive_file {5 * MIB}"
    write(
        tmp_path / "cgroup" / "memory",
        memory__limit_in_bytes=64 * MIB,
        memory__usage_in_bytes=50 * MIB,
        memory__stat=stat,
    )
    assert available_bytes(tmp_path / "cgroup", tmp_path / "self") == 19 * MIB


def test_no_limit_in_v1_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("4:memory:/\n")
    write(tmp_path / "cgroup" / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert available_bytes(tmp_path / "cgroup", tmp_path / "self") > 64 * MIB


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/\n")
    write(tmp_path / "cgroup", memory__max=MIB, memory__current=2 * MIB)
    assert available_bytes(tmp_path / "cgroup", tmp_path / "self") == 0


def test_sizes_read_well() -> None:
    assert (gib(15 << 30), gib(3 << 20)) == ("15.00 GiB", "3.0 MiB")
