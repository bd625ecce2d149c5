"""`laminar relay status` and `laminar bench relay`."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.schema.errors import PeerLost, UserError

if TYPE_CHECKING:
    from laminar.relay.chain_messages import ChainStatus
    from laminar.relay.messages import RelayStatus

MIB = 1 << 20


def status(run: Path | None, keeper: str | None, secret_file: Path | None) -> None:
    """Print what the relay of a live run holds, or its whole chain, or that of a keeper."""
    if (run is None) == (keeper is None):
        raise UserError("give the folder of a live run, or --keeper HOST:PORT with --secret-file, not both")
    sys.stdout.write((_of_run(run) if run is not None else _of_chain(keeper or "", secret_file)) + "\n")


def bench(mib: int, repeat: int, threads: int | None) -> None:
    """Print how fast weights go over one relay of this machine."""
    from laminar.relay import benchmark

    rules = benchmark.Options(repeat=repeat, threads=threads)
    models = {f"{mib} MiB": benchmark.large_model(mib * MIB), "SmolLM2-135M": benchmark.smollm2_135m()}
    for name, model in models.items():
        row = benchmark.measure(name, model, rules)
        sys.stdout.write(bench_table(row) + "\n")


def bench_table(row: dict[str, Any]) -> str:
    """One model's numbers, as lines."""
    milliseconds, memcpy_ms = row["ms"], row["ms"]["memcpy"]
    texts = {
        "memcpy": "one copy of as many bytes",
        "memcpy_by_tensor": "the same tensor by tensor",
        "publish_stall": "the learner stands still",
        "visible": "until a waiting replica has the version",
        "map": "a replica maps all tensors",
        "swap_in": "a replica copies them into its own",
    }
    head = f"{row['model']}: {row['payload_mib']} MiB in {row['tensors']} tensors, relay holds {row['relay_mib']} MiB"
    lines = [
        f"  {text:<42}{milliseconds[key]:>10.1f} ms{milliseconds[key] / memcpy_ms:>8.2f} x memcpy"
        for key, text in texts.items()
    ]
    return "\n".join([head, *lines])


def _of_run(run: Path) -> str:
    from laminar.relay.address import read_address
    from laminar.relay.client import ClientRules, RelayClient
    from laminar.relay.keeper import look
    from laminar.relay.messages import GetStatus, RelayStatus

    address = read_address(run)
    if address.keeper is not None:
        host, port = address.keeper
        try:
            return chain_table(asyncio.run(look(host, port, address.secret)))
        except PeerLost as error:
            raise UserError(f"{run} is not a run that is alive: {error}") from None

    async def ask() -> RelayStatus:
        client = RelayClient(Path(address.socket_path), address.secret, ClientRules(connect_s=2.0))
        try:
            return await client.call(GetStatus(), RelayStatus)
        finally:
            await client.close()

    try:
        return relay_table(asyncio.run(ask()))
    except PeerLost as error:
        raise UserError(f"{run} is not a run that is alive: {error}") from None


def _of_chain(keeper: str, secret_file: Path | None) -> str:
    from laminar.relay.keeper import look

    host, _, port = keeper.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--keeper {keeper} must look like HOST:PORT")
    if secret_file is None:
        raise UserError("--keeper needs --secret-file, the file with the chain's secret")
    try:
        secret = secret_file.read_bytes()
    except OSError as error:
        raise UserError(f"--secret-file {secret_file} cannot be read: {error.strerror}") from None
    try:
        return chain_table(asyncio.run(look(host, int(port), secret)))
    except PeerLost as error:
        raise PeerLost(f"no keeper of a chain at {keeper}: {error}") from None


def relay_table(status: "RelayStatus") -> str:
    """What one relay holds."""
    newest = "no version yet" if status.newest is None else f"newest version {status.newest}"
    coming = "".join(f", version {version} coming in" for version in status.incoming)
    lines = [
        f"{newest}{coming}; {status.num_slots} slots ({status.num_free_slots} free) of "
        f"{_size(status.slot_bytes)}; {status.num_peers} connections",
        f"{'version':>9}{'age':>10}{'size':>12}{'readers':>9}  ",
    ]
    lines += [
        f"{held.version:>9}{held.age_s:>8.1f} s{_size(held.num_bytes):>12}{held.num_leases:>9}"
        f"  {'pinned' if held.pinned else ''}".rstrip()
        for held in status.versions
    ]
    return "\n".join(lines)


def chain_table(status: "ChainStatus") -> str:
    """All relays in the order of their chain; the first is the master."""
    lines = [
        f"epoch {status.epoch}, {len(status.relays)} relays",
        f"  {'relay':<16}{'address':<24}{'newest':>8}{'coming':>8}{'holds':>12}{'hop':>14}{'silent':>10}",
    ]
    for report in status.relays:
        beat, member = report.beat, report.member
        cells = ("-", "-", "-", "-")
        if beat is not None:
            rate = f"{_size(int(beat.bytes_per_s))}/s" if beat.bytes_per_s else "-"
            cells = (_or_dash(beat.newest), _or_dash(beat.coming), _size(beat.held_bytes), rate)
        newest, coming, held, rate = cells
        lines.append(
            f"  {member.relay_id:<16}{f'{member.host}:{member.port}':<24}{newest:>8}{coming:>8}{held:>12}{rate:>14}"
            f"{report.silent_s:>8.1f} s"
        )
    return "\n".join(lines)


def _or_dash(version: int | None) -> str:
    return "-" if version is None else str(version)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / MIB:.1f} MiB"
