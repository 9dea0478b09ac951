// Sorting, compiled once for every machine: of the standard library's functions an instruction set may have no copies.
#pragma once

namespace specserve {

// The k-th largest of n numbers, k from 1; they change places.
float nth_largest(float* x, int n, int k);

void sort_down(float* x, int n);

}  // namespace specserve
