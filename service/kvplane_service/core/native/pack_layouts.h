// Reads in which order `decisions/packing.py` packs the fields of parts and results.
#pragma once

#include "pack.h"

namespace kvplane {

#define PACK_SCALAR(of, path) {#path, [](const of& from) { return static_cast<Int>(from.path); }}
#define PACK_FIELD(of, path) \
    {#path, [](const of& from, uint32_t number, Frame& frame) { frame.Add(number, from.path); }}
#define PACK_BITS(of, path)                                                                                      \
    {#path, [](const of& from, uint32_t number, Frame& frame) {                                                  \
         if (from.path.empty()) return;                                                                          \
         frame.AddNumbers(number, from.path.size(), [&](size_t at) { return static_cast<uint64_t>(from.path[at]); }); \
     }}
#define PACK_BLOCKS(name)                                                                                   \
    PACK_FIELD(PartResult, name.row), PACK_FIELD(PartResult, name.group), PACK_FIELD(PartResult, name.count), \
        PACK_FIELD(PartResult, name.ids)

// What a result has only with tiers.
#define PACK_TIERS(name, path)                                                \
    {#name, [](const PartResult& from, uint32_t number, Frame& frame) {       \
         if (from.tiers != nullptr) frame.Add(number, from.tiers->path);      \
     }}
#define PACK_JOBS(kind, column, name)                                                           \
    {"orders." #name, [](const PartResult& from, uint32_t number, Frame& frame) {               \
         if (from.tiers == nullptr || from.tiers->orders.kind.empty()) return;                  \
         const auto& rows = from.tiers->orders.kind;                                            \
         frame.AddNumbers(number, rows.size(),                                                  \
                          [&](size_t at) { return static_cast<uint64_t>(rows[at][column]); });  \
     }}

inline void ReadPartLayout(PyObject* of_part) {
    static constexpr Packer::Scalar<Part> part_scalars[] = {
        PACK_SCALAR(Part, cache.reset),        PACK_SCALAR(Part, cache.jobs_before),
        PACK_SCALAR(Part, cache.hits_checked),
        PACK_SCALAR(Part, run.on_refusal),     PACK_SCALAR(Part, admit.max_running),
        PACK_SCALAR(Part, admit.on_refusal),   PACK_SCALAR(Part, admit.only_if_no_preemption),
        PACK_SCALAR(Part, peek.with_blocks),   PACK_SCALAR(Part, budget.tokens),
        PACK_SCALAR(Part, budget.input),       PACK_SCALAR(Part, budget.overhead),
        PACK_SCALAR(Part, with_hashes),        PACK_SCALAR(Part, with_tables),
    };
    static constexpr Packer::Field<Part> part_fields[] = {
        PACK_FIELD(Part, facts.slot),           PACK_FIELD(Part, facts.computed),
        PACK_FIELD(Part, facts.appended),       PACK_FIELD(Part, facts.num_hashes),
        PACK_FIELD(Part, facts.hashes),         PACK_FIELD(Part, facts.commit),
        PACK_FIELD(Part, facts.end),            PACK_FIELD(Part, facts.fence),
        PACK_FIELD(Part, facts.release_skipped), PACK_FIELD(Part, facts.hint),
        PACK_FIELD(Part, cache.failed_steps),   PACK_FIELD(Part, cache.evicted),
        PACK_FIELD(Part, cache.released),       PACK_FIELD(Part, cache.loads_over),
        PACK_FIELD(Part, cache.jobs_done),      PACK_FIELD(Part, cache.jobs_failed),
        PACK_FIELD(Part, cache.costs_ns),       PACK_FIELD(Part, cache.mismatched),
        PACK_FIELD(Part, news.slot),
        PACK_FIELD(Part, news.num_tokens),      PACK_FIELD(Part, news.num_hashes),
        PACK_FIELD(Part, news.hashes),          PACK_FIELD(Part, news.request_id),
        PACK_FIELD(Part, news.domain),          PACK_FIELD(Part, news.skip_reading),
        PACK_FIELD(Part, news.max_tokens),      PACK_FIELD(Part, news.hint),
        PACK_FIELD(Part, run.slot),             PACK_FIELD(Part, run.extra),
        PACK_FIELD(Part, run.cap),              PACK_FIELD(Part, run.lookahead),
        PACK_FIELD(Part, run.in_flight),        PACK_FIELD(Part, run.flags),
        PACK_FIELD(Part, run.victims),          PACK_FIELD(Part, run.reserved),
        PACK_FIELD(Part, admit.slot),           PACK_FIELD(Part, admit.extra),
        PACK_FIELD(Part, admit.cap),            PACK_FIELD(Part, admit.lookahead),
        PACK_FIELD(Part, admit.external),       PACK_FIELD(Part, admit.expected_hit),
        PACK_FIELD(Part, admit.encoder_tokens), PACK_FIELD(Part, admit.reserved),
        PACK_FIELD(Part, admit.watermark),      PACK_FIELD(Part, admit.flags),
        PACK_FIELD(Part, admit.hit_limit),      PACK_FIELD(Part, admit.min_new),
        PACK_FIELD(Part, admit.single_group_hit), PACK_BITS(Part, admit.skip_zero_groups),
        PACK_FIELD(Part, peek.slot),            PACK_FIELD(Part, peek.limit),
        PACK_FIELD(Part, prefetch.slot),        PACK_FIELD(Part, prefetch.num_hashes),
        PACK_FIELD(Part, prefetch.hashes),      PACK_FIELD(Part, prefetch.domain),
        PACK_FIELD(Part, prefetch.within_ns),   PACK_FIELD(Part, retain.num_hashes),
        PACK_FIELD(Part, retain.hashes),        PACK_FIELD(Part, retain.domain),
        PACK_FIELD(Part, retain.owner),         PACK_FIELD(Part, retain.priority),
        PACK_FIELD(Part, retain.until_ns),      PACK_FIELD(Part, retain.percent),
        PACK_FIELD(Part, retain.now_ns),
    };
    Packer::Read(of_part, part_scalars, part_fields, &Packer::part);
}

inline void ReadResultLayout(PyObject* of_result) {
    static constexpr Packer::Scalar<PartResult> result_scalars[] = {
        PACK_SCALAR(PartResult, reset_done), PACK_SCALAR(PartResult, free_blocks),
        PACK_SCALAR(PartResult, taken_back), PACK_SCALAR(PartResult, went_back),
    };
    static constexpr Packer::Field<PartResult> result_fields[] = {
        PACK_FIELD(PartResult, granted),       PACK_FIELD(PartResult, preempted),
        PACK_FIELD(PartResult, admit_status),  PACK_FIELD(PartResult, admit_hit),
        PACK_FIELD(PartResult, admit_granted), PACK_FIELD(PartResult, admit_single_group_hit),
        PACK_FIELD(PartResult, admit_load_after),
        PACK_BLOCKS(new_blocks), PACK_BLOCKS(tables), PACK_BLOCKS(peek_blocks),
        PACK_FIELD(PartResult, peek_hit),      PACK_FIELD(PartResult, peek_single_group_hit),
        PACK_FIELD(PartResult, num_hashes),    PACK_FIELD(PartResult, last_hash),
        PACK_FIELD(PartResult, orders.stamp_block), PACK_FIELD(PartResult, orders.stamp),
        PACK_FIELD(PartResult, orders.copy_src), PACK_FIELD(PartResult, orders.copy_dst),
        PACK_FIELD(PartResult, orders.copy_group), PACK_FIELD(PartResult, orders.zero_block),
        PACK_FIELD(PartResult, orders.zero_group),
        PACK_FIELD(PartResult, hashed_facts),  PACK_FIELD(PartResult, hashed_news),
        PACK_TIERS(admit_job, admit_job),      PACK_TIERS(admit_tier_tokens, admit_tier_tokens),
        PACK_TIERS(declined.row, declined.row), PACK_TIERS(declined.why, declined.why),
        PACK_TIERS(declined.tier, declined.tier), PACK_TIERS(declined.hit, declined.hit),
        PACK_TIERS(declined.load_ns, declined.load_ns), PACK_TIERS(declined.compute_ns, declined.compute_ns),
        PACK_TIERS(prefetched.hit, prefetched.hit), PACK_TIERS(prefetched.blocks, prefetched.blocks),
        PACK_TIERS(prefetched.outcome, prefetched.outcome),
        PACK_TIERS(retained.hit, retained.hit), PACK_TIERS(retained.blocks, retained.blocks),
        PACK_TIERS(retained.left, retained.left), PACK_TIERS(retained.outcome, retained.outcome),
        PACK_TIERS(retained.next_end_ns, retained.next_end_ns),
        PACK_JOBS(load, 0, load_job),          PACK_JOBS(load, 1, load_tier),   PACK_JOBS(load, 2, load_slot),
        PACK_JOBS(load, 3, load_version),      PACK_JOBS(load, 4, load_block),  PACK_JOBS(load, 5, load_group),
        PACK_JOBS(load, 6, load_stamp),        PACK_JOBS(save, 0, save_job),    PACK_JOBS(save, 1, save_block),
        PACK_JOBS(save, 2, save_group),        PACK_JOBS(save, 3, save_stamp),  PACK_JOBS(save, 4, save_tier),
        PACK_JOBS(save, 5, save_slot),         PACK_JOBS(move, 0, move_job),    PACK_JOBS(move, 1, move_tier),
        PACK_JOBS(move, 2, move_slot),         PACK_JOBS(move, 3, move_version), PACK_JOBS(move, 4, move_to_tier),
        PACK_JOBS(move, 5, move_to_slot),
    };
    Packer::Read(of_result, result_scalars, result_fields, &Packer::result);
}

// pack_with(part, result, number of a part's result, number of its events, flat): the layouts, see `Packer::Read`, and
// numbers of chunks.
inline PyObject* PackWith(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        ReadPartLayout(At(arguments, 0));
        ReadResultLayout(At(arguments, 1));
        FromPy(At(arguments, 2), &Packer::of_result);
        FromPy(At(arguments, 3), &Packer::of_events);
        FromPy(At(arguments, 4), &Packer::flat);
        Packer::is_ready = true;
        Py_RETURN_NONE;
    });
}

}  // namespace kvplane
