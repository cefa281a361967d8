// The Python module `_native`: a replica's core behind a capsule. `kvplane_core.face.native` is its only user.

#include "bind_changes.h"
#include "bind_pack.h"

namespace kvplane {
namespace {

// Whether no size is one by which the core cannot divide, or that has no room in its columns.
bool IsSound(const Spec& spec) {
    const auto is_size = [](Int size) { return size > 0 && size <= kMaxTokens; };
    const auto fits = [&](const GroupSpec& group) {
        const Int least = group.kind == kChunked ? 1 : 0;
        return is_size(group.block_size) && group.chunk >= least && group.sink_blocks >= 0 &&
               group.sink_blocks < spec.num_blocks;
    };
    const auto num_groups = static_cast<Int>(spec.groups.size());
    Int num_ids = spec.num_blocks;
    for (const TierSpec& one : spec.tiers) num_ids += is_size(one.num_slots) ? one.num_slots : kForever / 4;
    const bool splits = spec.blocks_per_state > 0 && spec.num_blocks % spec.blocks_per_state == 0 &&
                        (spec.blocks_per_state == 1 || spec.num_blocks / spec.blocks_per_state >= 2);
    return splits && num_ids <= kUnlimited && spec.most_ahead >= 0 && spec.num_blocks >= 2 &&
           is_size(spec.num_blocks) && num_groups >= 1 && num_groups <= kMaxGroups && is_size(spec.max_model_len) &&
           is_size(spec.hash_block_size) && is_size(spec.scheduler_block_size) && spec.digest_size > 0 &&
           spec.policy >= kLru && spec.policy <= kHazard && std::all_of(spec.groups.begin(), spec.groups.end(), fits);
}

// Reads (digest of nothing, None or (capsule, form)): how tokens are hashed.
void ReadHasher(PyObject* given, Replica& replica) {
    TokenHasher& hasher = replica.facts.hasher;
    FromPy(At(given, 0), &hasher.none_hash);
    Check(hasher.none_hash.size == replica.spec.digest_size);
    hasher.block_size = static_cast<size_t>(replica.spec.hash_block_size);
    PyObject* const compiled = At(given, 1);
    if (compiled == Py_None) return;
    FromPy(At(compiled, 1), &hasher.form);
    hasher.run = reinterpret_cast<TokenHasher::Run>(PyCapsule_GetPointer(At(compiled, 0), "kvplane.hasher"));
    Check(hasher.run != nullptr);
    replica.blocks.requests.hash_block_bytes = 4 * hasher.block_size;
}

// new(settings, groups, tiers, hasher) -> a core
PyObject* New(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Column values;
        std::vector<Column> groups;
        std::vector<Column> tiers;
        FromPy(At(arguments, 0), &values);
        FromPy(At(arguments, 1), &groups);
        FromPy(At(arguments, 2), &tiers);
        PyObject* const hashing = At(arguments, 3);
        Spec spec;
        Int* const fields[] = {&spec.num_blocks,
                               &spec.max_model_len,
                               &spec.hash_block_size,
                               &spec.scheduler_block_size,
                               &spec.enable_caching,
                               &spec.kept_every,
                               &spec.partial_hits,
                               &spec.watermark_blocks,
                               &spec.safe,
                               &spec.prefill_lookahead,
                               &spec.keep_divergence_boundary,
                               &spec.events,
                               &spec.digest_size,
                               &spec.hash_lookahead_tokens,
                               &spec.align_block_size,
                               &spec.align_chunk_limit,
                               &spec.align_stop_at_tail,
                               &spec.policy,
                               &spec.hint_values,
                               &spec.most_ahead,
                               &spec.checkpoint_percent,
                               &spec.blocks_per_state};
        Check(values.size() == std::size(fields));
        for (size_t at = 0; at < values.size(); ++at) *fields[at] = values[at];
        for (const Column& group : groups) {
            Check(group.size() == 14 && group[0] >= kFull && group[0] <= kUncachedState);
            spec.groups.push_back({group[0], group[1], group[2], group[3], group[4], group[5], group[6], group[7],
                                   group[8], group[9], group[10], group[11], group[12], group[13]});
        }
        for (const Column& tier : tiers) {
            Check(tier.size() == 4 && tier[2] >= kBehind && tier[2] <= kReuse && tier[3] >= 0 && tier[3] <= tier[1]);
            spec.tiers.push_back({tier[0], tier[1], tier[2], tier[3]});
        }
        Check(IsSound(spec));
        std::unique_ptr<Core> core;
        WithoutLock([&] { core = std::make_unique<Core>(std::move(spec)); });  // millions of blocks take a while
        ReadHasher(hashing, core->replica);
        Core& made = *core;
        return made.capsule = Capsule(std::move(core), kName, Destroy);
    });
}

// Whether a part has tokens that Python hashes: those of requests with extra keys, or all.
bool NeedsPython(const Replica& replica, const Part& part) {
    if (!part.facts.tokens.count && !part.news.tokens.count) return false;
    if (replica.facts.hasher.run == nullptr || (part.news.tokens.count && part.news.num_extra_keys)) return true;
    return part.facts.tokens.count && replica.blocks.requests.num_outside;
}

// Applies the step that was read; `alone`: other threads run Python meanwhile. Returns the answer.
PyObject* ApplyRead(Core& core, PyObject* step, bool alone, bool with_events) {
    return Change(core, [&](Replica& replica) {
        const auto work = [&] { replica.Apply(core.step, &core.results); };
        if (alone) {
            WorkAlone(core, work);
        } else {
            work();
        }
        if (core.is_message) {
            core.applied = step;
            return AnswerToBytes(core, with_events);
        }
        Owned list(PyList_New(static_cast<Py_ssize_t>(core.results.size())));
        Py_ssize_t at = 0;
        core.held.Release(core.step.executed_through);
        for (PartResult& result : core.results) {
            core.held.Add(core.step.seq, &result.events);
            PyList_SetItem(list.get(), at++, ToPy(result));
        }
        core.applied = step;
        PyObject* answer = NewObject(answers.step);
        SLOT(answer, seq, ToPy(core.step.seq));
        SLOT(answer, part, ToPy(core.step.part));
        SLOT(answer, parts, list.Release());
        SLOT(answer, published_through, ToPy(replica.blocks.pool.executed_through));
        return answer;
    });
}

void ReadMade(PyObject* given, Made* made) {
    if (given == Py_None) return;
    ReadColumn(At(given, 0), &made->num_hashes);
    ReadHashes(At(given, 1), &made->hashes);
    made->given = true;
}

// Lets Python hash tokens of the step: per part a pair of None or (num_hashes, hashes), of facts and news. The step has
// the hashes as long as there is this object.
PyObject* HashOutside(Core& core, PyObject* hash, PyObject* step) {
    const uint64_t before = core.changes;
    Owned made(NotNull(PyObject_CallFunctionObjArgs(hash, step, nullptr)));
    Require(core.changes == before, "a step was applied while the tokens of another one were hashed");
    for (size_t number = 0; number < core.step.parts.size(); ++number) {
        PyObject* of_part = At(made.get(), static_cast<Py_ssize_t>(number));
        ReadMade(At(of_part, 0), &core.step.parts[number].facts_made);
        ReadMade(At(of_part, 1), &core.step.parts[number].news_made);
    }
    return made.Release();
}

// apply(core, step, alone, function that hashes tokens of a step, stamps of the memory when the life began, the step as
// `read_step` read it or None, whether its answer has events) -> answer, which for a step that was read is that of
// AnswerToBytes. Raises Refused, and changes nothing, if the step cannot be applied.
PyObject* Apply(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 7);
        Core& core = CoreOf(arguments[0]);
        core.applied = nullptr;
        core.is_message = arguments[5] != Py_None;
        if (core.is_message) {
            SentStep& sent = SentOf(arguments[5]);
            Check(!std::exchange(sent.is_applied, true));
            std::swap(core.step, sent.step);
        } else {
            ReadStep(arguments[1], &core.step);
        }
        std::optional<Buffer<uint64_t>> shown;
        if (core.step.resumes()) shown.emplace(arguments[4]);
        core.replica.shown = shown ? Shown{shown->data, shown->size} : Shown();
        Refusal refusal;
        // A validator that fails keeps what it notes of a step.
        if (!Change(core, [&](Replica& replica) { return replica.Accepts(core.step, &refusal); }))
            throw Refused{std::move(refusal)};
        const auto needs_python = [&](const Part& part) { return NeedsPython(core.replica, part); };
        const bool outside = std::any_of(core.step.parts.begin(), core.step.parts.end(), needs_python);
        const Owned hashes(outside ? HashOutside(core, arguments[3], arguments[1]) : Py_NewRef(Py_None));
        return ApplyRead(core, arguments[1], arguments[2] == Py_True, arguments[6] == Py_True);
    });
}

// answer_with(types of the objects in answers and values in events, see Answers)
PyObject* AnswerWith(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        PyObject** const types[] = {&answers.step,   &answers.part,        &answers.blocks,      &answers.orders,
                                    &answers.event,  &answers.kinds,       &answers.reasons,     &answers.device,
                                    &answers.events, &answers.packed_ints, &answers.tier_events, &answers.declined,
                                    &answers.prefetched, &answers.hashed, &answers.retained};
        Py_ssize_t at = 0;
        for (PyObject** type : types) *type = Py_NewRef(At(arguments, at++));
        Py_RETURN_NONE;
    });
}

// events(capsule) -> the events of a part
PyObject* Events(PyObject*, PyObject* events) {
    return Guarded([&] { return ToPy(EventsOf(events)); });
}

// read(core, question, ...) and change(core, name, ...), see the tables
PyObject* Read(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&] { return Questions().Run(arguments, count); });
}
PyObject* ChangeBy(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&] { return Changes().Run(arguments, count); });
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef Method(const char* name, Fast function, const char* doc) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, doc};
}

PyMethodDef kMethods[] = {
    {"new", New, METH_VARARGS, "Make a core."},
    Method("read_step", ReadSentStep, "Read a step from a message."),
    Method("apply", Apply, "Apply a step."),
    Method("read", Read, "Answer a question."),
    Method("change", ChangeBy, "Change the core."),
    Method("decode_row", DecodeRow, "Append what a running request gained, and grant it tokens."),
    {"recorded_rows", RecordedToPy, METH_O, "Return the rows of a closed step."},
    {"advance", Advance, METH_O, "Do the next slice of a check, an image or an end."},
    Method("pack_applied", PackApplied, "Return the decision about the last step, packed."),
    {"pack_events", PackEvents, METH_VARARGS, "Return events, packed."},
    {"removals", Removals, METH_O, "Count removed keys by reason."},
    {"events", Events, METH_O, "Return the events of a part."},
    {"answer_with", AnswerWith, METH_VARARGS, "Set the types of the objects in answers."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvplane

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&kvplane::kModule);
    if (module == nullptr) return nullptr;
    kvplane::refused_type = PyErr_NewException("_native.Refused", nullptr, nullptr);
    if (PyModule_AddObjectRef(module, "Refused", kvplane::refused_type) < 0 ||
        PyModule_AddStringConstant(module, "SOURCES", KVPLANE_SOURCES) < 0)
        Py_CLEAR(module);
    return module;
}
