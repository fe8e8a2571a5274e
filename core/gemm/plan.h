// SPDX-License-Identifier: Apache-2.0
//
// From the labels of a contraction and the shapes of its row-major operands to
// GEMMs that read and write them in place.
#ifndef JAX_LAYOUT_CORE_GEMM_PLAN_H_
#define JAX_LAYOUT_CORE_GEMM_PLAN_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace jax_layout {

// A matrix inside an array; strides count elements.
struct GemmMatrix {
  bool transposed = false;  // its columns, not its rows, are contiguous
  int64_t ld = 1;           // from one of these to the next
};

// One GEMM per step: what does not fit into m, n and k.
struct GemmLoop {
  int64_t extent;
  int64_t a_stride, b_stride, y_stride;  // 0 where an operand stays
};

// Where the matrices of a step start, in elements of their arrays.
struct GemmOffsets {
  int64_t a = 0, b = 0, y = 0;
};

inline int64_t StepsOf(const std::vector<GemmLoop>& loops) {
  int64_t steps = 1;
  for (const GemmLoop& loop : loops) steps *= loop.extent;
  return steps;
}

inline GemmOffsets OffsetsAt(const std::vector<GemmLoop>& loops, int64_t step) {
  GemmOffsets offsets;
  for (size_t i = loops.size(); i-- > 0;) {
    const GemmLoop& loop = loops[i];
    const int64_t at = step % loop.extent;
    step /= loop.extent;
    offsets.a += at * loop.a_stride;
    offsets.b += at * loop.b_stride;
    offsets.y += at * loop.y_stride;
  }
  return offsets;
}

//   y[m, n] = sum over k of a[m, k] * b[k, n]
//
// for every step of the loops, outermost in y first. y's rows are contiguous.
// Batch axes are loops, and so are parts of m and n whose axes do not merge:
// loops[].a_stride is 0 for those of n. m, n and k are 1 where no axis is, 0
// where one is empty.
struct GemmPlan {
  int64_t m = 1, n = 1, k = 1;
  GemmMatrix a, b, y;
  std::vector<GemmLoop> loops;
  // a is the second operand and b the first: a row-major y in which the first
  // operand's axis is contiguous is the transpose of a product.
  bool swapped = false;

  int64_t Steps() const { return StepsOf(loops); }
  GemmOffsets At(int64_t step) const { return OffsetsAt(loops, step); }
};

// A contraction, "bmk,bkn->bmn": each letter names an axis, and is in two or
// three of the terms. Letters in all three are batch axes.
struct GemmSpec {
  std::string a, b, y;
};

namespace gemm_internal {

enum Operand { kA, kB, kY };

struct Axis {
  int64_t extent = 1;
  std::array<int64_t, 3> stride = {};  // by Operand
};

// The axes that are in the same operands, in the order of their strides, those
// that follow each other in each operand merged.
inline std::vector<Axis> Merge(std::vector<Axis> axes, Operand order) {
  std::stable_sort(axes.begin(), axes.end(),
                   [order](const Axis& p, const Axis& q) {
                     return p.stride[order] > q.stride[order];
                   });
  std::vector<Axis> merged;
  for (const Axis& axis : axes) {
    if (axis.extent == 1) continue;
    bool follows = !merged.empty();
    for (int o = kA; follows && o <= kY; ++o) {
      follows = merged.back().stride[o] == axis.extent * axis.stride[o];
    }
    if (follows) {
      merged.back().extent *= axis.extent;
      merged.back().stride = axis.stride;
    } else {
      merged.push_back(axis);
    }
  }
  return merged;
}

// The matrix with these axes in an operand, or that neither is contiguous.
inline bool View(const Axis& rows, const Axis& cols, Operand o,
                 GemmMatrix* matrix) {
  const int64_t row = rows.stride[o], col = cols.stride[o];
  if (cols.extent == 1 || col == 1) {
    *matrix = {false, rows.extent == 1 ? cols.extent : row};
    return true;
  }
  if (rows.extent == 1 || row == 1) {
    *matrix = {true, col};
    return true;
  }
  return false;
}

inline std::string Text(const GemmSpec& spec) {
  return spec.a + "," + spec.b + "->" + spec.y;
}

// Splits "bmk,bkn->bmn".
inline Status Parse(std::string_view text, GemmSpec* spec) {
  const size_t comma = text.find(','), arrow = text.find("->");
  if (comma == text.npos || arrow == text.npos || arrow < comma) {
    return Status::Error("gemm: expected a contraction like mk,kn->mn, got " +
                         std::string(text) + ".");
  }
  *spec = {std::string(text.substr(0, comma)),
           std::string(text.substr(comma + 1, arrow - comma - 1)),
           std::string(text.substr(arrow + 2))};
  return Status::Ok();
}

struct Groups {
  std::vector<Axis> batch, m, n, k;
};

inline Status Group(const GemmSpec& spec, std::span<const int64_t> a_shape,
                    std::span<const int64_t> b_shape, Groups* groups) {
  const std::string* terms[] = {&spec.a, &spec.b, &spec.y};
  std::array<Axis, 128> axes;
  std::array<unsigned, 128> in = {};
  const std::string all = spec.a + spec.b + spec.y;
  const bool ranks =
      spec.a.size() == a_shape.size() && spec.b.size() == b_shape.size();
  for (size_t i = 0; ranks && i < spec.a.size() + spec.b.size(); ++i) {
    const unsigned char label = all[i];
    const bool second = i >= spec.a.size();
    const int64_t extent = second ? b_shape[i - spec.a.size()] : a_shape[i];
    if (label >= 128 || extent < 0 ||
        (second && (in[label] & 1) && axes[label].extent != extent)) {
      return Status::Error("gemm: extent " + std::to_string(extent) +
                           " of axis " + std::string(1, all[i]) + " of " +
                           Text(spec) + " does not agree.");
    }
    axes[label].extent = extent;
    if (in[label] & (second ? 2 : 1)) in[label] |= 8;
    in[label] |= second ? 2 : 1;
  }
  for (size_t i = 0; i < spec.y.size(); ++i) {
    const unsigned char label = spec.y[i];
    if (label >= 128) return Status::Error("gemm: axes are ASCII letters.");
    in[label] |= in[label] & 4 ? 8 : 4;
  }
  for (int o = kA; ranks && o <= kY; ++o) {
    int64_t stride = 1;
    for (size_t i = terms[o]->size(); i-- > 0;) {
      Axis& axis = axes[static_cast<unsigned char>((*terms[o])[i])];
      axis.stride[o] = stride;
      if (axis.extent > 0 &&
          __builtin_mul_overflow(stride, axis.extent, &stride)) {
        return Status::Error("gemm: operands must be smaller than 2^63.");
      }
    }
  }
  for (int label = 0; label < 128; ++label) {
    if (in[label] == 0) continue;
    std::vector<Axis>* group = in[label] == 7   ? &groups->batch
                               : in[label] == 5 ? &groups->m
                               : in[label] == 6 ? &groups->n
                               : in[label] == 3 ? &groups->k
                                                : nullptr;
    if (!ranks || group == nullptr) {
      return Status::Error(
          "gemm: every axis must be in two or three of the terms, once, got " +
          Text(spec) + " for operands of rank " +
          std::to_string(a_shape.size()) + " and " +
          std::to_string(b_shape.size()) + ".");
    }
    group->push_back(axes[label]);
  }
  groups->batch = Merge(groups->batch, kY);
  groups->m = Merge(groups->m, kY);
  groups->n = Merge(groups->n, kY);
  groups->k = Merge(groups->k, kA);
  return Status::Ok();
}

}  // namespace gemm_internal

// Makes the plan. `*in_place` says whether there is one; without, one of the
// terms needs its axes in another order (see ChooseGemmOrder).
inline Status MakeGemmPlan(std::string_view text,
                           std::span<const int64_t> a_shape,
                           std::span<const int64_t> b_shape, GemmPlan* plan,
                           bool* in_place) {
  using gemm_internal::Axis;
  *plan = {};
  *in_place = false;
  GemmSpec spec;
  Status status = gemm_internal::Parse(text, &spec);
  if (!status.ok()) return status;
  gemm_internal::Groups groups;
  status = gemm_internal::Group(spec, a_shape, b_shape, &groups);
  if (!status.ok()) return status;
  if (groups.k.size() > 1) return Status::Ok();
  const Axis k = groups.k.empty() ? Axis{} : groups.k[0];

  // Of all ways to choose m and n among their axes, the one with the largest
  // product at each step; an axis more than there are stands for none.
  int64_t best = -1;
  size_t best_m = 0, best_n = 0;
  for (size_t i = 0; i < std::max<size_t>(1, groups.m.size()); ++i) {
    for (size_t j = 0; j < std::max<size_t>(1, groups.n.size()); ++j) {
      const Axis m = groups.m.empty() ? Axis{} : groups.m[i];
      const Axis n = groups.n.empty() ? Axis{} : groups.n[j];
      if (m.extent * n.extent < best) continue;
      GemmPlan p;
      p.k = k.extent;
      const bool a = gemm_internal::View(m, k, gemm_internal::kA, &p.a);
      const bool b = gemm_internal::View(k, n, gemm_internal::kB, &p.b);
      const bool y = gemm_internal::View(m, n, gemm_internal::kY, &p.y);
      if (!a || !b || !y) continue;
      best = m.extent * n.extent;
      best_m = i;
      best_n = j;
      p.m = m.extent;
      p.n = n.extent;
      if (p.y.transposed) {  // y^T = b^T a^T
        std::swap(p.m, p.n);
        std::swap(p.a, p.b);
        p.a.transposed = !p.a.transposed;
        p.b.transposed = !p.b.transposed;
        p.y.transposed = false;
        p.swapped = true;
      }
      *plan = p;
    }
  }
  if (best < 0) return Status::Ok();
  *in_place = true;

  std::vector<Axis> rest = groups.batch;
  for (size_t i = 0; i < groups.m.size(); ++i) {
    if (i != best_m) rest.push_back(groups.m[i]);
  }
  for (size_t j = 0; j < groups.n.size(); ++j) {
    if (j != best_n) rest.push_back(groups.n[j]);
  }
  for (const Axis& axis : gemm_internal::Merge(rest, gemm_internal::kY)) {
    auto [a, b, y] = axis.stride;
    if (plan->swapped) std::swap(a, b);
    plan->loops.push_back({axis.extent, a, b, y});
  }
  return Status::Ok();
}

// The order of the axes that costs the least to reach: the contraction itself
// if it can run in place, else with one or more terms permuted. `*moved` counts
// the bytes that the permutes read and write.
inline Status ChooseGemmOrder(std::string_view text,
                              std::span<const int64_t> a_shape,
                              std::span<const int64_t> b_shape,
                              int64_t operand_itemsize, int64_t result_itemsize,
                              GemmSpec* order, int64_t* moved) {
  GemmSpec spec;
  Status status = gemm_internal::Parse(text, &spec);
  if (!status.ok()) return status;
  GemmPlan plan;
  bool in_place = false;
  status = MakeGemmPlan(text, a_shape, b_shape, &plan, &in_place);
  if (!status.ok()) return status;
  *order = spec;
  *moved = 0;
  if (in_place) return status;

  auto has = [](const std::string& term, char label) {
    return term.find(label) != term.npos;
  };
  // The labels of `from` that are (or are not) in `of`.
  auto pick = [&](const std::string& from, const std::string& of, bool in) {
    std::string labels;
    for (char label : from) {
      if (has(of, label) == in) labels += label;
    }
    return labels;
  };
  auto extent = [&](char label) {
    const size_t i = spec.a.find(label);
    return i != spec.a.npos ? a_shape[i] : b_shape[spec.b.find(label)];
  };
  auto size = [&](const std::string& term) {
    int64_t elements = 1;
    for (char label : term) elements *= extent(label);
    return elements;
  };
  int64_t best = -1;
  for (int permuted = 1; permuted < 8; ++permuted) {
    GemmSpec s = spec;
    if (permuted & 4) {
      const std::string a = pick(s.a, s.y, true);
      s.y = pick(a, s.b, true) + pick(a, s.b, false) +
            pick(pick(s.b, s.y, true), s.a, false);
    }
    const std::string batch = pick(pick(s.y, s.a, true), s.b, true);
    if (permuted & 1) {
      s.a = batch + pick(pick(s.y, spec.a, true), spec.b, false) +
            pick(permuted & 2 ? spec.a : spec.b, permuted & 2 ? spec.b : spec.a,
                 true);
      // Of the labels in both, only those that are summed over belong last.
      const size_t m = pick(pick(s.y, spec.a, true), spec.b, false).size();
      s.a = s.a.substr(0, batch.size() + m) +
            pick(s.a.substr(batch.size() + m), s.y, false);
    }
    if (permuted & 2) {
      s.b = batch + pick(pick(s.a, spec.b, true), s.y, false) +
            pick(pick(s.y, spec.b, true), spec.a, false);
    }
    const int64_t cost =
        2 * ((permuted & 1 ? size(spec.a) * operand_itemsize : 0) +
             (permuted & 2 ? size(spec.b) * operand_itemsize : 0) +
             (permuted & 4 ? size(spec.y) * result_itemsize : 0));
    if (best >= 0 && cost >= best) continue;
    std::vector<int64_t> a_order, b_order;
    for (char label : s.a) a_order.push_back(extent(label));
    for (char label : s.b) b_order.push_back(extent(label));
    status = MakeGemmPlan(gemm_internal::Text(s), a_order, b_order, &plan,
                          &in_place);
    if (!status.ok()) return status;
    if (!in_place) continue;
    best = cost;
    *order = s;
  }
  *moved = best;
  return Status::Ok();
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_GEMM_PLAN_H_
