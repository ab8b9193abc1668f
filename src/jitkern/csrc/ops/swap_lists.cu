// The lists of large calls of swap_rows. They know no row size, so that one module serves all.
#include "swap_lists.cuh"
