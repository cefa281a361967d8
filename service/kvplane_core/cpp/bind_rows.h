// Functions of the module `_native` for a step that is applied row by row, and reads of the engine in this process.
#pragma once

#include "bind_reads.h"

namespace kvplane {

inline OpenStep& RowsOf(Core& core) {
    Require(core.rows != nullptr, "no step is open");
    return *core.rows;
}

inline PyObject* TakeParts(OpenStep& rows) {
    Owned list(PyList_New(static_cast<Py_ssize_t>(rows.finished.size())));
    Py_ssize_t at = 0;
    for (PartResult& part : rows.finished) PyList_SetItem(list.get(), at++, ToPy(part));
    rows.finished.clear();
    return list.Release();
}

// Changes the open step. Throws Refused where `change` returns nullptr: the row is not valid.
template <typename F>
PyObject* ChangeRows(PyObject* capsule, F&& change) {
    Core& core = CoreOf(capsule);
    PyObject* answer = Change(core, [&](Replica&) { return change(RowsOf(core)); });
    if (answer == nullptr) throw Refused{core.rows->refusal()};
    return answer;
}

// open_step(core, executed_through, records) -> number of the step
inline PyObject* OpenRows(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const Int executed_through = Number(At(arguments, 1));
        if (core.rows == nullptr) core.rows = std::make_unique<OpenStep>(core.replica);
        return Change(core, [&](Replica&) {
            core.rows->Begin(executed_through, IsTrue(At(arguments, 2)));
            return ToPy(core.rows->seq());
        });
    });
}

// The columns of a recorded section by name, but those of which every entry is the default.
template <typename Section>
PyObject* ColumnsToPy(const Section& section) {
    Owned columns(PyDict_New());
    for (const auto& column : ColumnsOf(section)) {
        const Column& entries = section.*column.of;
        if (std::all_of(entries.begin(), entries.end(), [&](Int one) { return one == column.otherwise; })) continue;
        const auto bits = [&] { return ToPy(std::vector<uint64_t>(entries.begin(), entries.end())); };
        const Owned made(column.is_bits() ? bits() : ToPy(entries));
        if (PyDict_SetItemString(columns.get(), column.name, made.get()) != 0) throw Raised();
    }
    return columns.Release();
}

// The sections facts, run and admit of a part, and the hashes of the facts.
inline PyObject* RecordedToPy(const RecordedRows& rows) {
    return Tuple(ColumnsToPy(rows.facts), ColumnsToPy(rows.run), ColumnsToPy(rows.admit), ToPy(rows.hashes));
}

// close_step(core) -> (answers that `flush_step` has not returned, executed_through, recorded rows by part)
inline PyObject* CloseRows(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) {
            rows.Close();
            PyObject* parts = TakeParts(rows);
            Owned recorded(PyList_New(0));
            for (const RecordedRows& one : rows.recorded) Append(recorded, RecordedToPy(one));
            return Tuple(parts, ToPy(CoreOf(At(arguments, 0)).replica.blocks.pool.executed_through),
                         recorded.Release());
        });
    });
}

// flush_step(core) -> answers of complete parts that it has not returned before
inline PyObject* FlushRows(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) {
            rows.Flush();
            return TakeParts(rows);
        });
    });
}

// The answer to a row of a running request: False where it was not applied, None where it was refused, else new blocks.
inline PyObject* GrantedToPy(Granted granted, const OpenStep& rows) {
    switch (granted) {
        case Granted::kLeft:
            return Py_NewRef(Py_False);
        case Granted::kRefused:
            return Py_NewRef(Py_None);
        case Granted::kQuiet:
            return NotNull(PyTuple_New(0));
        default:
            const auto is_empty = [](const BlockList& row) { return row.empty(); };
            const bool none = std::all_of(rows.fresh.begin(), rows.fresh.end(), is_empty);
            return none ? NotNull(PyTuple_New(0)) : ToPy(rows.fresh);
    }
}

// decode_row(core, slot, num_tokens, digests, num_new, lookahead, in_flight)
inline PyObject* DecodeRow(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 7);
        const Int slot = Number(arguments[1]), num_tokens = Number(arguments[2]);
        const Growth growth{Number(arguments[4]), Number(arguments[5]), Number(arguments[6])};
        std::vector<uint8_t> joined;
        size_t digest_size = 0;
        Int num_digests = 0;
        if (!ReadDigests(arguments[3], &joined, &digest_size, &num_digests)) Py_RETURN_FALSE;
        const Hashes hashes{joined.data(), joined.size()};
        return ChangeRows(arguments[0], [&](OpenStep& rows) {
            return GrantedToPy(rows.Decode(slot, num_tokens, hashes, digest_size, growth), rows);
        });
    });
}

// extend_row(core, slot, num_new, lookahead, in_flight, flags, reserved)
inline PyObject* ExtendRow(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Int slot = Number(At(arguments, 1)), flags = Number(At(arguments, 5));
        Growth growth{Number(At(arguments, 2)), Number(At(arguments, 3)), Number(At(arguments, 4))};
        growth.leave_free = Number(At(arguments, 6));
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) -> PyObject* {
            const Granted granted = rows.Extend(slot, growth, flags);
            return granted == Granted::kLeft ? nullptr : GrantedToPy(granted, rows);
        });
    });
}

// update_row(core, Update) -> slots that are preempted
inline PyObject* UpdateRow(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        PyObject* row = At(arguments, 1);
        const auto column = [&](Py_ssize_t at, Int otherwise) {
            const Int value = Number(At(row, at));
            return value == otherwise ? Column() : Column{value};
        };
        Part part;
        std::vector<uint8_t> joined;
        size_t digest_size = 0;
        Int count = 0;
        ReadDigests(At(row, 3), &joined, &digest_size, &count);
        part.facts.slot = {Number(At(row, 0))};
        part.facts.computed = column(1, kUnchanged);
        part.facts.appended = column(2, 0);
        if (count) part.facts.num_hashes = {count};
        part.facts.hashes = Hashes{joined.data(), joined.size()};
        part.facts.commit = column(4, kUnchanged);
        part.facts.release_skipped = column(5, kUnchanged);
        part.facts.end = column(6, kEndNone);
        part.facts.fence = column(7, 0);
        part.facts.hint = column(8, kUnchanged);
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) -> PyObject* {
            Column preempted;
            return rows.Update(part, &preempted) ? ToPy(preempted) : nullptr;
        });
    });
}

// cache_row(core, Cache) -> (slots that are preempted, reset_done, number of the row's part)
inline PyObject* CacheRow(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Part part;
        ReadSection(At(arguments, 1), &part.cache);
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) -> PyObject* {
            Column preempted;
            if (!rows.ChangeCache(part, &preempted)) return nullptr;
            return Tuple(ToPy(preempted), PyBool_FromLong(rows.reset_done()), ToPy(rows.number_of_part()));
        });
    });
}

// add_row(core, News) -> number of the row's part
inline PyObject* AddRow(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Part part;
        ReadSection(At(arguments, 1), &part.news);
        Check(part.news.slot.size() == 1);
        return ChangeRows(At(arguments, 0),
                          [&](OpenStep& rows) { return rows.Add(part) ? ToPy(rows.number_of_part()) : nullptr; });
    });
}

inline uint64_t Bits(PyObject* object) {
    uint64_t bits = 0;
    FromPy(object, &bits);
    return bits;
}

// admit_row(core, slot, num_hit, num_new, terms: AdmitRow) -> (status, new blocks per group or None)
inline PyObject* AdmitOneRow(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        PyObject* terms = At(arguments, 4);
        const Int num_new = Number(At(arguments, 3));
        Part part;
        Py_ssize_t at = 0;
        for (const auto& column : ColumnsOf(part.admit)) {
            PyObject* const entry = At(terms, at++);
            (part.admit.*column.of) = {column.is_bits() ? static_cast<Int>(Bits(entry)) : Number(entry)};
        }
        part.admit.slot = {Number(At(arguments, 1))};
        part.admit.expected_hit = {Number(At(arguments, 2))};
        part.admit.min_new = {0};
        part.admit.on_refusal = kSkip;
        return ChangeRows(At(arguments, 0), [&](OpenStep& rows) -> PyObject* {
            const Int status = rows.Admit(&part, num_new);
            if (status < 0) return nullptr;
            return Tuple(ToPy(status), status == kGranted ? ToPy(rows.AdmittedBlocks()) : Py_NewRef(Py_None));
        });
    });
}

// is_granted(core, slot): whether the slot runs in the open step; slot -1: whether any does
inline PyObject* IsGranted(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const OpenStep& rows = RowsOf(CoreOf(At(arguments, 0)));
        const Int slot = Number(At(arguments, 1));
        return PyBool_FromLong(slot < 0 ? rows.num_granted() > 0 : rows.HasGranted(slot));
    });
}

// look_up(core, slot, limit) -> as find, or None: the slot has no request
inline PyObject* LookUpSlot(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const Int slot = Number(At(arguments, 1)), limit = Number(At(arguments, 2));
        const Coordinator& blocks = core.replica.blocks;
        if (!blocks.requests.IsLive(slot)) Py_RETURN_NONE;
        return LookUp(core, blocks.requests.content[slot].count(), [&] { return blocks.FindHit(slot, limit); });
    });
}

// find_each(core, digests, max_tokens) -> (blocks, lengths in tokens) per group, see `PrefixLookup.find_each`
inline PyObject* FindEach(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Core& core = CoreOf(At(arguments, 0));
        Digests digests;
        Int count = 0;
        Check(ReadDigests(At(arguments, 1), &digests.bytes, &digests.size, &count));
        uint32_t id = kUnknownDomain;
        core.replica.blocks.pool.pairs.Known(std::string(), &id);
        const auto [rows, lengths] = core.replica.blocks.lookup->FindEach(digests, id, Number(At(arguments, 2)));
        return Tuple(ToPy(rows), ToPy(lengths));
    });
}

// tables(core, slot) -> blocks per group
inline PyObject* TablesOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        const Int slot = Number(At(arguments, 1));
        Check(slot >= 0 && slot < blocks.requests.size());
        Owned list(PyList_New(0));
        for (const auto& one : blocks.managers) Append(list, ToPy(one->table[slot]));
        return list.Release();
    });
}

inline const GroupManager& ManagerOf(PyObject* arguments) {
    const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
    const Int group = Number(At(arguments, 1));
    Check(group >= 0 && group < static_cast<Int>(blocks.managers.size()));
    return *blocks.managers[static_cast<size_t>(group)];
}

// (registered blocks, (index, block) of a state or hit that is copied before a write, whether a state was allocated,
// (length, index, end) of the state inside the last chunk) of a request in a group; None where there is none
inline PyObject* OfGroup(const GroupManager& manager, Int slot) {
    const auto partial = manager.partial_hit.find(slot);
    const Owned copied(partial == manager.partial_hit.end() ? Py_NewRef(Py_None) : ToPy(partial->second));
    if (manager.spec.kind != kAlignedState)
        return Tuple(ToPy(manager.num_cached[slot]), Py_NewRef(copied.get()), Py_NewRef(Py_False), Py_NewRef(Py_None));
    const auto& states = static_cast<const AlignedStateManager&>(manager);
    const auto found = states.last_checkpoints.find(slot);
    PyObject* checkpoint = nullptr;
    if (found == states.last_checkpoints.end()) {
        checkpoint = Py_NewRef(Py_None);
    } else {
        const auto& [length, index, end] = found->second;
        checkpoint = Tuple(ToPy(length), ToPy(index), ToPy(end));
    }
    return Tuple(ToPy(manager.num_cached[slot]), Py_NewRef(copied.get()), PyBool_FromLong(states.has_allocated[slot]),
                 checkpoint);
}

// request(core, slot) -> (request id, hashes joined, size of one, blocks that a transfer of an ended request reads in
// the order of their release, OfGroup by group)
inline PyObject* RequestOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = CoreOf(At(arguments, 0)).replica;
        const Int slot = Number(At(arguments, 1));
        const Requests& requests = replica.blocks.requests;
        Check(slot >= 0 && slot < requests.size());
        const auto held = replica.tracker.held.find(slot);
        Owned groups(PyList_New(0));
        for (const auto& one : replica.blocks.managers) Append(groups, OfGroup(*one, slot));
        const bool is_live = requests.IsLive(slot);
        return Tuple(ToPy(is_live ? requests.request_id[slot] : std::string()),
                     ToPy(is_live ? requests.content[slot].bytes : std::vector<uint8_t>()),
                     ToPy(is_live ? requests.content[slot].size : size_t{0}),
                     ToPy(held == replica.tracker.held.end() ? BlockList() : held->second), groups.Release());
    });
}

// skipped(core, group, computed) -> leading tokens to which the next token does not attend
inline PyObject* SkippedOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Int computed = Number(At(arguments, 2));
        Check(IsPosition(computed));
        return ToPy(ManagerOf(arguments).SkippedTokens(computed));
    });
}

// needed(core, group, Need, hit) -> free blocks that the allocation takes, see `GroupManager.blocks_needed`
inline PyObject* NeededOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const GroupManager& manager = ManagerOf(arguments);
        PyObject* given = At(arguments, 2);
        const auto position = [&](Py_ssize_t at) {
            const Int value = Number(At(given, at));
            Check(IsPosition(value));
            return value;
        };
        Need need{position(0), position(1), position(2), position(3), position(4), position(5)};
        need.capped = IsTrue(At(given, 6));
        BlockList hit;
        FromPy(At(arguments, 3), &hit);
        Check(need.slot < static_cast<Int>(manager.table.size()));
        for (const Block block : hit) Check(block < manager.pool.num_blocks);
        return ToPy(manager.BlocksNeeded(need, hit));
    });
}

// take_blocks(core, count) -> free blocks, which belong to no request from now on
inline PyObject* TakeBlocks(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Int count = Number(At(arguments, 1));
        return Change(CoreOf(At(arguments, 0)), [&](Replica& replica) {
            BlockList taken;
            replica.blocks.pool.Take(count, &taken);
            return ToPy(taken);
        });
    });
}

// touch_blocks(core, blocks): adds a reference to each
inline PyObject* TouchBlocks(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        BlockList blocks;
        FromPy(At(arguments, 1), &blocks);
        return Change(CoreOf(At(arguments, 0)), [&](Replica& replica) {
            for (const Block block : blocks) Require(block < replica.blocks.pool.num_blocks, "no such block");
            for (const Block block : blocks) replica.blocks.pool.Touch(block);
            return Py_NewRef(Py_None);
        });
    });
}

}  // namespace kvplane
