// The message of a decode step, as `RowsWriter` in kvplane/wire/packed_step.py makes it: what a service reads most.
#pragma once

#include "answers.h"

namespace {

struct Rows {
    uint64_t epoch = 0, seq = 0, part = 0, more = 0, executed_through = 0;
    Span message, slots, tokens, num_hashes, hashes, jobs, extra;  // the part, and the columns in it
    bool appended = false;
};

bool Equal(Span one, Span other) {
    return one.size == other.size && (one.size == 0 || std::memcmp(one.at, other.at, one.size) == 0);
}

// Each request got one token, or hashes of blocks: its column has a 1 for each slot.
bool ReadFacts(Span section, Rows* rows) {
    Span ones;
    Fields fields(section);
    while (fields.Next()) {
        switch (fields.number) {
            case 1: rows->slots = fields.Bytes(); break;
            case 3: ones = fields.Bytes(); break;
            case 4: rows->tokens = fields.Bytes(); break;
            case 5: rows->num_hashes = fields.Bytes(); break;
            case 6: rows->hashes = fields.Bytes(); break;
            default: return false;
        }
    }
    rows->appended = true;
    if (!fields.ok || ones.size != rows->slots.size) return false;
    for (size_t at = 0; at + 4 <= ones.size; at += 4) {
        if (Read<uint32_t>(ones.at + at) != 1) return false;
    }
    const auto is_column = [&](Span column) { return column.size == 0 || column.size == ones.size; };
    return is_column(rows->tokens) && is_column(rows->num_hashes) &&
           (rows->hashes.size == 0 ? rows->num_hashes.size == 0 : rows->tokens.size == 0);
}

bool ReadRun(Span section, Rows* rows) {
    Span slots;
    Fields fields(section);
    while (fields.Next()) {
        switch (fields.number) {
            case 1: slots = fields.Bytes(); break;
            case 2: rows->extra = fields.Bytes(); break;
            default: return false;
        }
    }
    if (!fields.ok || (rows->appended && !Equal(slots, rows->slots))) return false;
    rows->slots = slots;
    const bool is_last = rows->extra.at + rows->extra.size == rows->message.at + rows->message.size;
    return slots.size > 0 && slots.size % 4 == 0 &&
           (rows->extra.size == 0 || (rows->extra.size == slots.size && is_last));
}

// The section has jobs that are done, and nothing else.
bool ReadJobs(Span section, Rows* rows) {
    Fields fields(section);
    if (!fields.Next() || fields.number != 7) return false;
    rows->jobs = fields.Bytes();
    return !fields.Next() && fields.ok && rows->jobs.size > 0 && rows->jobs.size % 8 == 0;
}

bool ReadRowsOf(Span message, Rows* rows) {
    Fields kinds(message);
    if (!kinds.Next() || kinds.number != 2) return false;
    Fields fields(kinds.Bytes());
    if (!kinds.ok || kinds.Next() || !kinds.ok) return false;
    while (fields.Next()) {
        switch (fields.number) {
            case 1: rows->epoch = fields.Number(64); break;
            case 2: rows->seq = fields.Number(64); break;
            case 3: rows->part = fields.Number(32); break;
            case 4: rows->more = fields.Number(1); break;
            case 5: rows->executed_through = fields.Number(64); break;
            case 6: rows->message = fields.Bytes(); break;
            default: return false;
        }
    }
    if (!fields.ok || rows->message.at == nullptr) return false;
    Fields sections(rows->message);
    bool is_read = sections.Next();
    if (is_read && sections.number == 1) is_read = ReadFacts(sections.Bytes(), rows) && sections.Next();
    if (is_read && sections.number == 2) is_read = ReadJobs(sections.Bytes(), rows) && sections.Next();
    is_read = is_read && sections.number == 4 && ReadRun(sections.Bytes(), rows);
    return is_read && !sections.Next() && sections.ok;
}

// A column as bytes; a format of Py_BuildValue would make None of one that is not there.
PyObject* AsBytes(Span column) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(column.at), static_cast<Py_ssize_t>(column.size));
}

PyObject* ReadRows(PyObject*, PyObject* raw) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(raw, &data, &size) < 0) return nullptr;
    Rows rows;
    if (!ReadRowsOf({reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)}, &rows)) Py_RETURN_NONE;
    const Py_ssize_t tokens_at = rows.tokens.size ? rows.tokens.at - rows.message.at : 0;
    return Py_BuildValue("(KKKOKNNOnnnNNN)", static_cast<unsigned long long>(rows.epoch),
                         static_cast<unsigned long long>(rows.seq), static_cast<unsigned long long>(rows.part),
                         rows.more ? Py_False : Py_True, static_cast<unsigned long long>(rows.executed_through),
                         AsBytes(rows.message), AsBytes(rows.slots), rows.appended ? Py_True : Py_False, tokens_at,
                         static_cast<Py_ssize_t>(rows.tokens.size / 4), static_cast<Py_ssize_t>(rows.extra.size / 4),
                         AsBytes(rows.num_hashes), AsBytes(rows.hashes), AsBytes(rows.jobs));
}

}  // namespace
