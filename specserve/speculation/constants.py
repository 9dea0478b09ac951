"""Every constant of who drafts and how much, with what chose it: tests in virtual time are those of tests/speculation,
replays and measurements are in benchmarks/LOG.md. That of 2026-11-26 changed one after another: what it could not tell
from its absence is gone, or is for what virtual time does not have (pauses, first answers, answers that end early)."""

from __future__ import annotations

# What is worth asking, and how long drafts are.
MOST_JUMP_FORWARD = 16  # forced tokens of a draft; a step of so many rows takes about half as long again as one of one
WORTH = 0.04  # more tokens a second must be expected of a model that is asked: it slows other things down, too
EXPLORED = 0.005  # of a step's time for asking what seems not to pay: half of what drafts may lose in all
MOST_EXPLORED = 4.0  # answers that may be saved up for: what a source saves while it pays is not for when it does not
HOPE = 0.5  # tokens a step that a new sequence is expected to gain: a source's prior of being accepted
FORGETS = 0.1  # of what a sequence gained, each time it is asked: ten answers
SILENT, SELDOM = 32, 8  # steps without a draft, after which heads are weighed in every eighth step alone, as that takes
# 1 % of one on two cores, and where steps begin ahead look-ups are asked in these alone (no GPU has measured that)
# Of drafters that must read a sequence before its first draft (test_sources).
ON_THE_WAY = 16  # tokens that a draft's first pass reads with the last one; more are read, and paid for, before it
LASTS = 64  # steps that a sequence is expected to go on, at most
# Of what asking takes.
LEARNS = 0.1  # share of what was measured last
HELD_UP = 8.0  # times what was expected: more was a pause of the machine
WARM = 8  # answers of one length to one number of sequences, of which the quickest counts: caches warm
# What drafters take.
NGRAMS_PER_STEP = 2**12  # that are taken in for all sequences of a step together: 1 to 2 ms, as was measured
MOST_MISSING = (
    16  # tokens of a sequence without KV of a head that drafts all the same, and that wait to be written to it:
)
# by default a block of the prefix cache, so that who goes on from a prefix of a sequence gets drafts
LATE_MEMORY_BYTES = 4 * 2**20  # of a drafter that comes when the cache has its size: small beside what that leaves, and
# 25,000 tokens of a suffix store
Q_TOLERANCE = 1e-3  # how far a row's sum may be from 1: float32 softmax over 256k ids errs by less, bfloat16 by more
# Joint admission.
FEW_NODES = 8  # that costs are looked up for at once, as many as a sequence alone has
LOOKS_AGAIN, LIKELY = 32, 0.1  # steps between two in which nodes of that survival are verified to see what they take,
# where that is in doubt: up to as many rows as the step has anyway (test_rows_that_seemed_dear_are_tried)
WAIT_S = 0.008  # by which drafts may lengthen a step, for each sequence that decodes, where there are several: a stream
# beside forced tokens of another then waits 20 ms at most on AVX2 (`beside.py`, LOG)
# The guard. The promise is 2 % and a constant; half of it is for what is lost between two looks.
SHARE = 0.01  # of the time may be lost, and
STEPS = 2  # plain steps, at first
GAINED = 4  # plain steps: what of gains counts for later; drafts that pay have unlucky stretches
MIDDLE_OF = 3  # plain steps of a load: the middle one tells what it takes, and no pause of the machine
STALE = 512  # steps after which a load's plain steps tell no more of it
PAUSE = 2.0  # times what steps with drafts of as many rows take: more is a pause of the machine
BLOCKS = ((1.3, 256), (1.1, 64), (0.0, 16))  # by measured speed: steps with drafts, at most, between two plain ones,
# which cost 0.1 % of what drafts gain at 1.3x, 0.2 % at 1.1x, and 6 % of the steps where nothing is gained
TRIAL = 0.5  # plain steps that drafts may lose where nothing is left, to show that they pay again
TRIAL_AFTER = 32  # plain steps, or twice as many as the last time it failed: drafting is back within 32 steps
# Of drafters that are told of steps (test_upkeep).
TRIAL_STEPS = 256  # of decoding, after which one is judged: token recycling begins with an empty table
TRIAL_LOSES = 16  # plain steps at most until then: a block head is told of four prompts of 1,000 tokens for that
TRIAL_PAYS = 4  # plain steps, which a trial that has failed is taken to have lost at least, and which count of gains
UPKEEP_SHARE = 0.005  # of the time may be lost by trials, until they fail: half of what drafts may lose in all
MOST_HALVED = 6  # times: the longest wait for another trial is 50,000 plain steps
# Acceptance (PRIOR, KEPT, OWN_PRIOR and OWN_KEPT: the replay).
BUCKETS, DEPTHS = 8, 8  # of confidence, and of depth; deeper is as the deepest
PRIOR = 4.0  # trials that a source's own confidence counts for
KEPT = 0.99  # of the weight of what was counted, with each trial: about the last hundred count
OWN_PRIOR, OWN_KEPT = 2.0, 0.95  # hits that are expected of a sequence before it has any; of the others' weight
FORCED = 0.97  # how likely a forced token is at first: others may spell the same
