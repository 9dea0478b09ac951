// One instruction set's kernels: this file is compiled once for each, with SPECSERVE_ISA as its name.
//
// To add one: simd_NAME.h, which says how many floats its vectors have and what can be done with them (simd_avx512.h
// explains each function); a line in CMakeLists.txt with its compiler flags; two in isa.cpp, which recognise a processor
// that has it. How weights and keys lie in memory and the order of sums stay as they are: rowwise.h checks that they
// are whole vectors.
#include SPECSERVE_SIMD
// after the vectors it computes with
#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "reject.h"
#include "rope_and_cache.h"
#include "rowwise.h"
#include "sample.h"
#include "score.h"

#define SPECSERVE_TEXT(name) #name
#define SPECSERVE_NAME(name) SPECSERVE_TEXT(name)

namespace specserve::SPECSERVE_ISA {

extern const Kernels kKernels = {SPECSERVE_NAME(SPECSERVE_ISA), linear, gated, shrink, embed_adapters, embed, fused_add_norm, joined_norms, norm_projections, gather_rows,
                                 rope_and_cache, attention, attention_segment, merge_segments, quantize_activation, softcap, sample,
                                 probabilities, total, reject, sample_from, score, argmax, top_k, draw, route,
                                 combine};

}
