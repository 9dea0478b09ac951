// Sorting for sampling.
#include "order.h"

#include <algorithm>
#include <functional>

namespace specserve {

float nth_largest(float* x, int n, int k) {
  std::nth_element(x, x + k - 1, x + n, std::greater<float>());
  return x[k - 1];
}

void sort_down(float* x, int n) { std::sort(x, x + n, std::greater<float>()); }

}  // namespace specserve
