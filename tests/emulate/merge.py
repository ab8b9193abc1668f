"""The merge of partial results made wrong, and which of its kernels are run."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

from jitkern.ops import merge

F32, F16, BF16, E4M3 = range(4)
"""As merge._TYPES has them."""

# dim, elements of a vector, types of the partials, the result and their lse, partials.
_FEW = (
    (3, 1, F32, F32, F16, 2),
    (24, 4, F32, BF16, BF16, 16),
    (40, 8, BF16, F32, F32, 4),
    (8, 8, F16, E4M3, F32, 64),
    (300, 1, F32, F32, F32, 32),  # in three steps
    (1102, 2, F16, F16, F32, 2),  # in two, and a lane is left over
    (96, 8, F16, F16, F16, 8),
)
_KERNELS = (
    *_FEW,
    (1, 1, F16, F16, F32, 2),
    (1, 1, BF16, E4M3, BF16, 8),
    (1, 1, F32, F16, F32, 64),
    (3, 1, BF16, BF16, F32, 16),
    (3, 1, F16, F32, BF16, 4),
    (5, 1, F32, E4M3, F32, 8),
    (5, 1, F16, BF16, F16, 16),
    (8, 8, F16, F16, F32, 4),
    (8, 4, F32, F32, F32, 64),
    (8, 1, BF16, F32, F16, 2),
    (24, 8, BF16, BF16, F32, 64),
    (24, 2, F32, F16, F16, 8),
    (40, 4, F16, F16, BF16, 32),
    (40, 4, F32, E4M3, F32, 16),
    (70, 2, BF16, BF16, F32, 8),
    (70, 1, F16, E4M3, F16, 2),
    (70, 2, F32, F32, BF16, 32),
    (96, 4, BF16, F16, F32, 64),
    (96, 4, F32, F32, F32, 4),
    (96, 8, BF16, E4M3, F32, 2),
    (128, 8, BF16, BF16, F32, 2),
    (128, 8, F16, F32, F32, 16),
    (128, 8, BF16, BF16, F32, 64),
    (128, 1, F32, BF16, F32, 8),
    (576, 8, BF16, BF16, F32, 8),
    (576, 4, F32, F32, F32, 16),
    (576, 1, F16, F16, F32, 4),
    (2100, 4, F32, F16, F32, 2),
    (2100, 4, BF16, E4M3, BF16, 16),
    (2100, 2, F16, BF16, F16, 64),
)


def _kernel(
    dim: int, vec_elems: int, in_type: int, out_type: int, lse_type: int, capacity: int
) -> str:
    teams = max(1, capacity // merge.STATES_OF_THREAD)
    row_threads, rows = merge.block_shape(dim // vec_elems, teams)
    numbers = (dim, vec_elems, in_type, out_type, lse_type, capacity, row_threads * rows * teams)
    return f"Kernel<{','.join(map(str, numbers))},{rows}>"


DEFINES = (
    f"MERGE_FEW={','.join(_kernel(*one) for one in _FEW)}",
    f"MERGE_KERNELS={','.join(_kernel(*one) for one in _KERNELS)}",
)

SWEEP = Sweep("merge", ("SWEEP_FEW",))
TEAMS = "if (team != 0) return own;"
ADDED = "const Weight weight = shared.weights[t][member];"
# That lanes which have nothing to do load, compute or store what others do is seen by nobody.
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/merge.cu",
        # Which rows and partials there are.
        ("row behind the last", "row < p.to.num_rows;", "row <= p.to.num_rows;"),
        ("lane of another row", "+ member / kRowThreads;", "+ member % kRows;"),
        ("head of another row", "head = row - token_of_launch * p.to.heads.value", "head = row"),
        ("launch from the start", "p.to.first_token + token_of_launch", "token_of_launch"),
        ("token of 32 bits", "p.to.first_token + token", "u32(p.to.first_token) + token"),
        (
            "first of one token more",
            "token < p.to.tokens_of_first",
            "token <= p.to.tokens_of_first",
        ),
        ("first of all tokens", "token < p.to.tokens_of_first ? 0 : 1", "0"),
        ("first of no token", "token < p.to.tokens_of_first ? 0 : 1", "1"),
        (
            "first of the launch",
            "token < p.to.tokens_of_first",
            "token_of_launch < p.to.tokens_of_first",
        ),
        ("partials of no row", "is_row ? num_valid(p.to, token) : 0", "num_valid(p.to, token)"),
        ("partials of the first team", "p.states + team * kStates", "p.states"),
        ("first of each team", "first <= team * kStates + s", "first <= s"),
        ("first partial forgotten", "first <= team * kStates + s", "first < team * kStates + s"),
        ("partial behind the last", "team * kStates + s < behind", "team * kStates + s <= behind"),
        ("partials of all teams", "&& team * kStates + s < behind", "&& s < behind"),
        ("num_valid of the first token", "to.valid_per_token ? token : 0", "0"),
        ("num_valid of each token", "to.valid_per_token ? token : 0", "token"),
        ("num_valid of 4 bytes", "to.num_valid_bytes == 4 ?", "true ?"),
        ("num_valid of 8 bytes", "to.num_valid_bytes == 4 ?", "false ?"),
        ("num_valid ignored", "if (to.num_valid == nullptr) return", "return"),
        ("num_valid below zero", "count < 0 ? 0 :", ""),
        ("num_valid beyond", "count < to.num_states ? count : to.num_states", "count"),
        (
            "as many as fit",
            "if (to.num_valid == nullptr) return to.num_states;",
            "if (to.num_valid == nullptr) return kCapacity;",
        ),
        # Where they are.
        ("lse of other tokens", "token * states[s].lse_token", "token * states[s].out_token"),
        ("lse of other heads", "head * states[s].lse_head", "head * states[s].lse_token"),
        (
            "values of other tokens",
            "token * states[s].out_token",
            "token_of_launch * states[s].out_token",
        ),
        ("values of other heads", "head * states[s].out_head", "head * states[s].lse_head"),
        (
            "all from the first",
            "const char* from =\n            states[s].out +",
            "const char* from =\n            states[0].out +",
        ),
        ("values behind the row", "if (!is_there(s) || vec >= kVecs)", "if (!is_there(s))"),
        ("first vectors again", "load(lane + ++step * kRowThreads)", "++step, load(lane)"),
        ("missing tail", "(kVecs + kRowThreads - 1) / kRowThreads", "kVecs / kRowThreads"),
        ("first step alone", "if (step + 1 == kSteps) return;", "return;"),
        (
            "result of other tokens",
            "token * p.to.out_token_stride",
            "token * p.states[0].out_token_stride",
        ),
        (
            "result of other heads",
            "head * p.to.out_head_stride",
            "head * p.states[0].out_head_stride",
        ),
        (
            "merged lse of other tokens",
            "token * p.to.lse_token_stride",
            "token * p.states[0].lse_token_stride",
        ),
        (
            "merged lse of other heads",
            "head * p.to.lse_head_stride",
            "head * p.states[0].lse_head_stride",
        ),
        ("result behind the row", "team == 0 && vec < kVecs", "team == 0 && vec <= kVecs"),
        (
            "result behind the last row",
            "if (is_row && team == 0 && vec <",
            "if (team == 0 && vec <",
        ),
        ("result of every team", "if (is_row && team == 0 && vec <", "if (is_row && vec <"),
        ("lse of every team", "if (is_row && team == 0 && vec ==", "if (is_row && vec =="),
        ("lse of nobody", "&& p.to.lse != nullptr", ""),
        ("lse of the partials' type", "p.to.lse_type, log", "kLse, log"),
        ("vectors as they came", "i64(vec) * kOutBytes", "i64(vec) * kInBytes"),
        ("vectors over each other", "(to + i * item_bytes_of(kOut))", "(to)"),
        ("halves of vectors alike", "(means + i)", "(means)"),
        # Threads that wait for each other.
        (
            "lse written before it is read",
            "if (step == 0 && p.to.lse_is_in_place) __syncthreads();",
            "",
        ),
        ("barrier of whole rows", "step == 0 && p.to.lse_is_in_place", "is_row && vec < kVecs"),
        ("values written before they are read", "__syncthreads();  // the last", "// the last"),
        ("values read before they are written", f"__syncthreads();\n    {TEAMS}", TEAMS),
        ("values of one lane", "shared.values[team][i][member]", "shared.values[team][i][0]"),
        ("weights of one team", "shared.weights[team][member]", "shared.weights[0][member]"),
    ),
    *mutants_of(
        SWEEP,
        "ops/merge.cu",
        # What they weigh.
        (
            "nothing from nothing",
            "largest == -float_of_bits(0x7f800000) ? 0.0f : largest",
            "largest",
        ),
        ("infinity less infinity", "log == center ? 1.0f :", ""),
        ("another base", "(log - center) * log2_of_base", "log - center"),
        ("upside down", "(log - center)", "(center - log)"),
        ("none is empty", "bits_as<kLse>(-float_of_bits(0x7f800000))", "Bits<kLse>{}"),
        (
            "largest is above 1",
            "Weight all{-float_of_bits(0x7f800000), 0.0f};",
            "Weight all{0.0f, 0.0f};",
        ),
        ("last for largest", "all.log = fmaxf(all.log, shares[s]);", "all.log = shares[s];"),
        ("count for a sum", "all.sum += shares[s];", "all.sum += 1.0f;"),
        ("nothing times NaN", "if (share == 0.0f) return;", ""),
        ("zero without a sign", "values[i] = -0.0f;  // one", "values[i] = 0.0f;  // one"),
        (
            "zero of teams without a sign",
            "values[i] = -0.0f;\n    for",
            "values[i] = 0.0f;\n    for",
        ),
        (
            "last partial first",
            "(vecs[s]), from);\n      add(shares[s]",
            "(vecs[kStates - 1 - s]), from);\n      add(shares[kStates - 1 - s]",
        ),
        ("teams apart", "if constexpr (kTeams == 1) return own;", "return own;"),
        ("largest of the first team", "for (int t = 1; t < kTeams;", "for (int t = 1; t < 1;"),
        (
            "largest of the others",
            "float largest = own.log;",
            "float largest = -float_of_bits(0x7f800000);",
        ),
        ("all as large as the first", "Weight all{largest, 0.0f};", "Weight all{own.log, 0.0f};"),
        ("NaN of a team", "if (weight.sum != weight.sum) share = weight.sum;", ""),
        ("first team alone", "for (int t = 0; t < kTeams;", "for (int t = 0; t < 1;"),
        ("team counted as one", "fmaf(share, weight.sum, all.sum)", "all.sum + share"),
        ("values of the first team", "shared.values[t][i][member]", "shared.values[0][i][member]"),
        ("last team first", "for (int t = 0; t < kTeams; ++t)", "for (int t = kTeams; t-- > 0;)"),
        ("lse without a sum", "+ log2f(all.sum) * p.to.base_log_of_2", ""),
        ("lse to base 2", "log2f(all.sum) * p.to.base_log_of_2", "log2f(all.sum)"),
        ("lse to another base", "* p.to.base_log_of_2", "* p.to.log2_of_base"),
        ("sum for a mean", "1.0f / (kOut == kFloat8E4M3 ? sum * scale : sum)", "1.0f"),
        ("mean of nothing", "sum == 0.0f ? 0.0f :", ""),
        ("times the scale", "sum * scale : sum", "sum / scale : sum"),
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
