// The lists of large calls on pairs. They know no row size, so that one module serves all.
#include "pair_lists.cuh"
