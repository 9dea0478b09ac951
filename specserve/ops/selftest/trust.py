"""Which kernels serve on a GPU: the fastest that pass the self-test."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from specserve.errors import ConfigError
from specserve.ops import Ops
from specserve.ops.choice import reference_for
from specserve.ops.selftest import Findings, self_test
from specserve.ops.selftest.attention import OF_CHAINS
from specserve.ops.selftest.uses import Uses


@dataclass(frozen=True, slots=True)
class Trusted:
    """Kernels that serve, what the self-test found of them, and of others before them, in lines for people."""

    ops: Ops
    findings: Findings
    lines: tuple[str, ...] = ()


def trusted(
    ops: Ops,
    choose: Callable[[Collection[str]], Ops],
    uses: Uses | None = None,
    block_size: int = 16,
    *,
    needs_bits: bool = True,
) -> Trusted:
    """`ops`, or what `choose` makes without the backends that fail the self-test. A backend that fails in one op is
    refused as a whole: weights, plans and graphs of two kinds of kernels do not fit together, and no test has ever
    seen such a mixture. Where nothing is left that passes, the last ones serve if their numbers are right; unless it
    `needs_bits`, whoever computes right numbers passes.

    Raises ConfigError if they are not."""
    lines: list[str] = []
    refused: list[str] = []
    while True:
        findings = self_test(ops, reference_for(ops), uses, block_size)
        if not (findings.faults if needs_bits else findings.wrong):
            return Trusted(ops, findings, tuple(lines))
        refused.append(ops.name)
        found = f"the self-test on {ops.device}: {findings}"
        try:
            other = choose(refused)
        except ConfigError as error:
            if findings.wrong:
                raise ConfigError(
                    f"The {ops.name} kernels fail {found}. No others serve this device and these options: use "
                    f"--device cpu, or other options. {error}"
                ) from None
            lines.append(
                f"The {ops.name} kernels serve though they fail {found}. What a request gets may depend on which "
                "others run beside it, and on drafts."
            )
            return Trusted(ops, findings, tuple(lines))
        lines.append(
            f"The {ops.name} kernels are refused, as they fail {found}. The {other.name} kernels serve all ops in "
            "their place, several times slower."
        )
        ops = other


def choose_attention(ops: Ops, asked: str, uses: Uses | None = None, block_size: int = 16) -> str:
    """Let `ops` have the attention that is `asked` for, of config.ATTENTIONS: with "flash" and "auto" that of the first
    package whose numbers are right, for prompts and chains. Returns what is to be said of it at the start, "" of exact
    attention. Raises ConfigError where there is none for "flash"."""
    if asked == "exact":
        return ""
    reasons = []
    if uses is not None and uses.has("alibi"):
        reasons.append("the model's attention has ALiBi, which it does not know")
    for name, why in ops.flash_attentions(block_size).items() if not reasons else ():
        if why is None:
            ops.use_flash(name, block_size)
            found = self_test(ops, reference_for(ops), uses, block_size, checks=OF_CHAINS)
            if not found.wrong:
                return (
                    f"Attention of prompts and chains is {name}'s flash attention, which chooses its tiles by the "
                    "longest sequence of a step: texts are the same with and without drafts, and in any batch, only "
                    f"where tiles are equal. Trees are the {ops.name} kernels' own."
                )
            why = f"fails the self-test on {ops.device}: {found}"
        reasons.append(f"{name} {why}")
    ops.use_flash("", block_size)
    told = "; ".join(reasons) or f"the {ops.name} kernels use none"
    if asked == "flash":
        raise ConfigError(f"--attention flash: {told}. Use --attention exact, the default.")
    return f"Attention is exact, as flash attention cannot be used: {told}."
