"""Machine code for all compute groups of a Hopper kernel: what is changed in what Triton writes, and what is not."""

from __future__ import annotations

import re
import threading

import pytest

pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from ioattn.backends.gluon.one_code import one_code, shared_by

CHAIN = """\
	setp.eq.b16 	%p2, %rs5, 0;
	@%p2 bra 	$L__BB0_6;
// %bb.3:                               // %loop
                                        //   in Loop: Header=BB0_2 Depth=1
	setp.eq.b16 	%p3, %rs5, 1;
	@%p3 bra 	$L__BB0_28;
// %bb.4:                               // %loop
	setp.eq.b16 	%p4, %rs5, 2;
	@%p4 bra 	$L__BB0_83;
"""
TABLE = """\
	setp.gt.u32 	%p2, %rs5, 2;
	@%p2 bra 	$L__BB0_4;
// %bb.3:                               // %loop
	$L_brx_0: .branchtargets
		$L__BB0_6,
		$L__BB0_28,
		$L__BB0_83;
	brx.idx 	%rs5, $L_brx_0;
$L__BB0_4:
"""
ROLE = """\
$L__BB0_{label}:                              //   in Loop: Header=BB0_2 Depth=1
	setmaxnreg.inc.sync.aligned.u32 	232;
	bar.sync 	{barrier}, 128;
	add.s32 	%r1, %r0, 8;
	// begin inline asm
	@%p7 mbarrier.arrive.shared::cta.b64 _, [%r1];
	// end inline asm
	bar.sync 	{barrier}, 128;
{{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;
	@!complete bra.uni waitLoop;
}}
	bar.sync 	{barrier}, 128;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {{%r2}};
	@%p9 bra 	$L__BB0_{label};
	setmaxnreg.dec.sync.aligned.u32 	120;
	bra.uni 	$L__BB0_2;
"""


def kernel(start: str) -> str:
    """A kernel with two compute groups, as Triton writes it; the loader comes first and last."""
    loader = "\tbar.sync \t0, 128;\n\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r9];\n"
    roles = ROLE.format(label=6, barrier=2) + ROLE.format(label=28, barrier=3)
    begin = f"// %bb.0:\n\tmov.u32 \t%r0, %tid.x;\n{loader}$L__BB0_2:\n\tld.shared.b8 \t%rs5, [%r248+198340];\n"
    return f"{begin}{start}{roles}$L__BB0_83:\n{loader}\tret;\n"


def role(ptx: str, label: int) -> str:
    """The code of one role."""
    return ptx[ptx.index(f"$L__BB0_{label}:") :].partition("setmaxnreg.dec")[0]


@pytest.mark.parametrize("start", [CHAIN, TABLE], ids=["comparisons", "table"])
@pytest.mark.parametrize("by_warp", [False, True])
def test_all_groups_run_the_first_code(start: str, by_warp: bool) -> None:
    ptx = one_code(kernel(start), 2, by_warp)
    branches = [line for line in ptx.splitlines() if re.search(r"\$L__BB0_(6|28|83)\b[,;]", line)]
    assert sum("$L__BB0_6" in line for line in branches) == 4, "two entries and two loops"
    assert sum("$L__BB0_83" in line for line in branches) == 1
    assert role(ptx, 28) == role(kernel(start), 28).replace("bra \t$L__BB0_28", "bra \t$L__BB0_6")
    assert "bar.sync \t2, 128" not in role(ptx, 6)
    assert ptx.count("bar.sync \t0, 128") == 2
    assert ptx.count("@%p1 mbarrier.arrive") == 2


def test_warps_arrive_by_themselves() -> None:
    code = role(one_code(kernel(CHAIN), 2, True), 6)
    assert "\tbar.warp.sync -1;\n\t@%elected mbarrier.arrive.shared::cta.b64 _, [%r1];" in code
    before_store = code.partition("stmatrix")[0].splitlines()
    assert [line for line in before_store if "bar.sync" in line] == ["\tbar.sync \t%own, 128;"]
    assert "bar.sync" in before_store[-2]


def test_a_single_group_keeps_its_barrier() -> None:
    code = role(one_code(kernel(CHAIN), 1, True), 6)
    assert code.count("bar.sync \t2, 128") == 1
    assert code.count("@%elected mbarrier.arrive") == 1


@pytest.mark.parametrize("changed", ["ld.shared.b8", "bar.sync \t2, 128"])
def test_other_code_is_not_touched(changed: str) -> None:
    with pytest.raises(ValueError, match="warp roles"):
        one_code(kernel(CHAIN).replace(changed, "something"), 2, True)


def test_an_arrival_of_unknown_form_is_refused() -> None:
    """It would be one of four that its barrier waits for."""
    unknown = kernel(CHAIN).replace("@%p7 mbarrier.arrive.shared", "@%p7 mbarrier.arrive.release.cta.shared")
    assert one_code(unknown, 2, False)
    with pytest.raises(ValueError, match="another form"):
        one_code(unknown, 2, True)


def test_what_other_threads_compile_is_not_touched() -> None:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.add_stages_inspection_hook
    stages: list[dict[str, object]] = [{"ptx": str}, {"ptx": str}]
    with shared_by(2, False):
        add = knobs.runtime.add_stages_inspection_hook
        other = threading.Thread(target=add, args=(None, stages[1], None, None, None))
        other.start()
        other.join()
        add(None, stages[0], None, None, None)
        assert add() == ("", "")
    assert stages[0]["ptx"] is not str
    assert stages[1]["ptx"] is str
    assert knobs.runtime.add_stages_inspection_hook is before
