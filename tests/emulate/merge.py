"""The merge of partial results made wrong, and which of its kernels are run."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

from jitkern.ops.merge_kernel import STATES_OF_THREAD, BlockShape

F32, F16, BF16, E4M3 = range(4)
"""As in _TYPES of jitkern.ops.merge_kernel."""

# dim, elements of a vector, types of the partials, the result and their lse, partials, plain.
_FEW = (
    (3, 1, F32, F32, F16, 2, 0),
    (24, 4, F32, BF16, BF16, 16, 0),
    (40, 8, BF16, F32, F32, 4, 0),
    (8, 8, F16, E4M3, F32, 64, 0),
    (3, 1, F16, F16, F32, 2, 1),
    (300, 1, F32, F32, F32, 32, 1),  # in three steps
    (1102, 2, F16, F16, F32, 2, 1),  # in two, and a lane is left over
    (96, 8, F16, F16, F16, 8, 1),
)
_KERNELS = (
    *_FEW,
    (1, 1, F16, F16, F32, 2, 0),
    (1, 1, BF16, E4M3, BF16, 8, 1),
    (1, 1, F32, F16, F32, 64, 0),
    (3, 1, BF16, BF16, F32, 16, 1),
    (3, 1, F16, F32, BF16, 4, 0),
    (5, 1, F32, E4M3, F32, 8, 1),
    (5, 1, F16, BF16, F16, 16, 0),
    (8, 8, F16, F16, F32, 4, 1),
    (8, 4, F32, F32, F32, 64, 0),
    (8, 1, BF16, F32, F16, 2, 1),
    (24, 8, BF16, BF16, F32, 64, 0),
    (24, 2, F32, F16, F16, 8, 1),
    (40, 4, F16, F16, BF16, 32, 0),
    (40, 4, F32, E4M3, F32, 16, 1),
    (70, 2, BF16, BF16, F32, 8, 0),
    (70, 1, F16, E4M3, F16, 2, 1),
    (70, 2, F32, F32, BF16, 32, 0),
    (96, 4, BF16, F16, F32, 64, 1),
    (96, 4, F32, F32, F32, 4, 0),
    (96, 8, BF16, E4M3, F32, 2, 1),
    (128, 8, BF16, BF16, F32, 2, 0),
    (128, 8, F16, F32, F32, 16, 1),
    (128, 8, BF16, BF16, F32, 64, 0),
    (128, 1, F32, BF16, F32, 8, 1),
    (576, 8, BF16, BF16, F32, 8, 0),
    (576, 4, F32, F32, F32, 16, 1),
    (576, 1, F16, F16, F32, 4, 0),
    (2100, 4, F32, F16, F32, 2, 1),
    (2100, 4, BF16, E4M3, BF16, 16, 0),
    (2100, 2, F16, BF16, F16, 64, 1),
)


def _kernel(
    dim: int, vec_elems: int, in_type: int, out_type: int, lse_type: int, capacity: int, plain: int
) -> str:
    teams = max(1, capacity // STATES_OF_THREAD)
    shape = BlockShape.of(dim // vec_elems, teams)
    num_threads = shape.row_threads * shape.rows * teams * shape.times
    numbers = (dim, vec_elems, in_type, out_type, lse_type, capacity, plain)
    return f"Kernel<{','.join(map(str, (*numbers, num_threads, *shape)))}>"


DEFINES = (
    f"MERGE_FEW={','.join(_kernel(*one) for one in _FEW)}",
    f"MERGE_KERNELS={','.join(_kernel(*one) for one in _KERNELS)}",
)

SWEEP = Sweep("merge", ("SWEEP_FEW",))
TEAMS = "if (team != 0) return own;"
# What is known of a place where a partial, or the result, is.
VALUES = "place.offset(states[s].out_strides)"
LOGS = "place.offset(states[s].lse_strides)"
TO_VALUES = "place.offset(p.to.out_strides)"
TO_LOGS = "place.offset(p.to.lse_strides)"
BARRIER = "if (step == 0 && p.to.lse_is_in_place) __syncthreads();"
WRITES = "place.is_row && team == 0 && vec < kVecs"
# That lanes which have nothing to do load, compute or store what others do is seen by nobody.
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/merge.cu",
        # Which rows and partials there are.
        ("row behind the last", "is_row(row < to.num_rows)", "is_row(row <= to.num_rows)"),
        ("lane of another row", "+ member / kRowThreads)", "+ member % p.to.rows_of_block)"),
        ("rows of large blocks", "p.to.rows_of_block +", "(kTeamThreads / kRowThreads) +"),
        ("head of another row", "head = row - token * to.heads.value", "head = row"),
        ("partials of no row", "!place.is_row ? 0 : kPlain", "kPlain"),
        ("partials of no plain row", "return place.is_row;", "return true;"),
        ("two of any number", "if (kPlain && kCapacity == 2)", "if (kPlain)"),
        ("as many as fit plainly", "kPlain ? p.to.num_states :", "kPlain ? kCapacity :"),
        ("first of all tokens", "place.token >= p.to.tokens_of_first;", "false;"),
        ("first of no token", "&& place.token >= p.to.tokens_of_first;", ";"),
        ("first of one token more", "place.token >= p.to.tokens", "place.token > p.to.tokens"),
        ("copy of what counts", "if (is_copy) logs[1] = 0;", ""),
        ("copy without its lse", "if (is_copy) own.log = lse_of_copy;", ""),
        (
            "lse of all as of a copy",
            "if (is_copy) own.log = lse_of_copy;",
            "own.log = lse_of_copy;",
        ),
        ("partials of the first team", "p.states + team * kStates", "p.states"),
        (
            "first partial forgotten",
            "is_copy <= team * kStates + s",
            "is_copy < team * kStates + s",
        ),
        ("partial behind the last", "kStates + s < end", "kStates + s <= end"),
        ("partials of all teams", "&& team * kStates + s < end", "&& s < end"),
        ("num_valid of the first token", "to.valid_per_token ? token : 0", "0"),
        ("num_valid of each token", "to.valid_per_token ? token : 0", "token"),
        ("num_valid of 4 bytes", "to.num_valid_bytes == 4 ?", "true ?"),
        ("num_valid of 8 bytes", "to.num_valid_bytes == 4 ?", "false ?"),
        ("num_valid ignored", "if (to.num_valid == nullptr) return", "return"),
        ("num_valid below zero", "count < 0 ? 0 :", ""),
        ("num_valid beyond", "count < to.num_states ? count : to.num_states", "count"),
        ("as many as fit", "== nullptr) return to.num_states;", "== nullptr) return kCapacity;"),
        # Where they are.
        ("plain rows at one place", "row * strides.head", "strides.head"),
        ("tokens at one place", "token * strides.token + head", "head"),
        (
            "heads at one place",
            "token * strides.token + head * strides.head",
            "token * strides.token",
        ),
        ("tokens for heads", "token * strides.token + head", "head * strides.token + token"),
        ("lse at the values' strides", LOGS, VALUES),
        ("lse at the first one's strides", f"if (!kPlain) at = {LOGS};", ""),
        ("values at the lse's strides", VALUES, LOGS),
        ("values at the first one's strides", f"if (!kPlain) at = {VALUES};", ""),
        (
            "plain values where the lse are",
            "at = place.offset(p.states[0].out_strides);",
            "",
        ),
        ("merged lse at the values' strides", TO_LOGS, TO_VALUES),
        ("merged lse where one was", f"at = {TO_LOGS};", ""),
        ("result at the lse's strides", TO_VALUES, TO_LOGS),
        ("result where one was", f"at = {TO_VALUES};", ""),
        ("stride of each team's lse", "(p.states[0].lse_strides", "(states[0].lse_strides"),
        ("stride of each team's values", "(p.states[0].out_strides", "(states[0].out_strides"),
        ("all values of the first", "states[s].out + at", "states[0].out + at"),
        ("all lse of the first", "states[s].lse + at", "states[0].lse + at"),
        ("values behind the row", "if (!is_there(s) || vec >= kVecs)", "if (!is_there(s))"),
        ("first vectors again", "load(lane + ++step * kRowThreads)", "++step, load(lane)"),
        ("missing tail", "(kVecs + kRowThreads - 1) / kRowThreads", "kVecs / kRowThreads"),
        ("first step alone", "if (step + 1 == kSteps) return;", "return;"),
        ("result behind the row", WRITES, "place.is_row && team == 0 && vec <= kVecs"),
        ("result behind the last row", WRITES, "team == 0 && vec < kVecs"),
        ("result of every team", WRITES, "place.is_row && vec < kVecs"),
        ("lse of nobody", "&& p.to.lse != nullptr", ""),
        ("lse of the partials' type", "p.to.lse_type, log", "kLse, log"),
        ("vectors as they came", "vec * kOutBytes", "vec * kInBytes"),
        ("vectors over each other", "(to + i * item_bytes_of(kOut),", "(to,"),
        ("halves of vectors alike", "(values + i)", "(values)"),
        # Threads that wait for each other.
        ("lse written before it is read", BARRIER, ""),
        ("barrier of whole rows", BARRIER, "if (writes) __syncthreads();"),
        ("values written before they are read", "__syncthreads();  // the last", "// the last"),
        ("values read before they are written", f"__syncthreads();\n    {TEAMS}", TEAMS),
        ("values of one lane", "shared.values[team][i][member]", "shared.values[team][i][0]"),
        ("weights of one team", "shared.weights[team][member]", "shared.weights[0][member]"),
    ),
    *mutants_of(
        SWEEP,
        "ops/merge.cu",
        # What they weigh.
        ("nothing from nothing", "largest == -float_of_bits(0x7f800000) ? 0.0f :", ""),
        ("endless for empty", "log_of(float_of<kLse>(logs[s]))", "float_of<kLse>(logs[s])"),
        ("another base", "(log - center) * log2_of_base", "log - center"),
        ("upside down", "(log - center)", "(center - log)"),
        ("none is empty", "bits_as<kLse>(-float_of_bits(0x7f800000))", "Bits<kLse>{}"),
        ("largest is above 1", "all{-float_of_bits(0x7f800000), 0.0f}", "all{0.0f, 0.0f}"),
        ("last for largest", "all.log = fmaxf(all.log, shares[s]);", "all.log = shares[s];"),
        ("count for a sum", "all.sum += shares[s];", "all.sum += 1.0f;"),
        ("nothing times NaN", "if (share == 0.0f) return;", ""),
        ("zero without a sign", "values[i] = sum == 0.0f ? 0.0f : -0.0f;", "values[i] = 0.0f;"),
        ("nothing with a sign", "values[i] = sum == 0.0f ? 0.0f : -0.0f;", "values[i] = -0.0f;"),
        ("zero of the first team", "start(all.sum, values)", "start(own.sum, values)"),
        (
            "last partial first",
            "#pragma unroll\n    for (int s = 0; s < kStates; ++s) {\n      float from",
            "for (int s = kStates; s-- > 0;) {\n      float from",
        ),
        ("teams apart", "if constexpr (kTeams == 1) return own;", "return own;"),
        ("largest of the first team", "for (int t = 1; t < kTeams;", "for (int t = 1; t < 1;"),
        ("largest of the others", "all{own.log, 0.0f}", "all{-float_of_bits(0x7f800000), 0.0f}"),
        ("sum of one team", "for (int t = 0; t < kTeams;", "for (int t = 0; t < 1;", 0, 2),
        ("values of one team", "for (int t = 0; t < kTeams;", "for (int t = 0; t < 1;", 1, 2),
        ("team counted as one", ", log2_of_base) * weight.sum;", ", log2_of_base);"),
        ("first team's values", "shared.values[t][i][member]", "shared.values[0][i][member]"),
        ("other lane's weights", "= shared.weights[t][member];", "= shared.weights[t][0];"),
        (
            "last team first",
            "for (int t = 0; t < kTeams; ++t)",
            "for (int t = kTeams; t-- > 0;)",
            *(1, 2),
        ),
        ("lse without a sum", "+ log2_of(all.sum) * p.to.base_log_of_2", ""),
        ("lse without a zero's sign", "all.sum == 1.0f ? all.log : sum_log", "sum_log"),
        ("lse to base 2", "log2_of(all.sum) * p.to.base_log_of_2", "log2_of(all.sum)"),
        ("lse to another base", "* p.to.base_log_of_2", "* p.to.log2_of_base"),
        ("sum for a mean", "shares[i] *= factor;", ";"),
        ("sum of teams for a mean", "share_out<kTeams>(all.sum, shares);", ""),
        ("mean of nothing", "sum == 0.0f ? 0.0f : inverse_of(sum)", "inverse_of(sum)"),
        ("times the scale", "inverse_of(scale)", "scale"),
        ("scale of one", "kOut == kFloat8E4M3 ? *p.to.scale : 1.0f", "1.0f"),
        ("scale of nobody", "kOut == kFloat8E4M3 ? *p.to.scale : 1.0f", "*p.to.scale"),
    ),
    *mutants_of(
        SWEEP,
        "ops/floats.cuh",
        ("lower half twice", "(pair >> 16)", "(pair)"),
        ("first value twice", "bits_as<kType>(values[1])", "bits_as<kType>(values[0])"),
        ("first byte twice", "bits_as<kFloat8E4M3>(values[1])", "bits_as<kFloat8E4M3>(values[0])"),
        ("pairs of bytes over each other", "<< (i % 4 * 8)", "<< (i % 2 * 8)"),
        ("bytes in one word", "to.words[i / 4] |=", "to.words[0] |="),
        ("pairs in one word", "to.words[i / 2] = rounded", "to.words[0] = rounded"),
        ("pairs of one word", "from.words[i / 2]", "from.words[0]"),
        ("numbers of one word", "float_of_bits(from.words[i])", "float_of_bits(from.words[0])"),
        ("number in one word", "to.words[i] = bits", "to.words[0] = bits"),
        ("lse of 32 bits", "if (type == kFloat32) {", "if (true) {"),
        ("lse of another half", "type == kFloat16 ? rounded", "type != kFloat16 ? rounded"),
    ),
]
