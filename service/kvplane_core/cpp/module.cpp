// The Python module `_native`: a replica's core behind a capsule. `kvplane_core.face.native` is its only user.

#include "bind_bytes.h"
#include "bind_check.h"
#include "bind_image.h"
#include "bind_lives.h"
#include "bind_pack.h"
#include "bind_reads.h"
#include "bind_rows.h"
#include "bind_tiers.h"

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
        return Capsule(std::move(core), kName, Destroy);
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

// check_alone(core, part): raises Refused if a replica without requests could not apply the part
PyObject* CheckAlone(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        static const Requests kNobody;
        if (!core.of_nobody)
            core.of_nobody = std::make_unique<StepValidator>(core.replica.spec, kNobody, nullptr, nullptr);
        const Owned parts(PyList_New(0));
        Append(parts, Py_NewRef(At(arguments, 1)));
        Step step{.seq = 1};
        ReadParts(parts.get(), &step.parts);
        if (!core.of_nobody->Accepts(step)) throw Refused{core.of_nobody->refusal()};
        Py_RETURN_NONE;
    });
}

// set_hash_tail(core, slot, the same)
PyObject* SetHashTail(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        Requests& requests = core.replica.blocks.requests;
        const Int slot = Number(At(arguments, 1));
        PyObject* const tail = At(arguments, 2);
        Check(requests.IsLive(slot));
        std::vector<uint8_t> pending;
        if (tail != Py_None) FromPy(tail, &pending);
        Check(pending.size() % 4 == 0 && pending.size() < requests.hash_block_bytes);
        requests.HashOutside(slot, tail == Py_None);
        std::copy(pending.begin(), pending.end(), requests.PendingOf(slot));
        requests.num_pending[slot] = static_cast<uint32_t>(pending.size());
        Py_RETURN_NONE;
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
PyObject* Events(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        return ToPy(EventsOf(At(arguments, 0)));
    });
}

PyMethodDef kMethods[] = {
    {"new", New, METH_VARARGS, "Make a core."},
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(Apply)), METH_FASTCALL, "Apply a step."},
    {"check_alone", CheckAlone, METH_VARARGS, "Check a part for a replica without requests."},
    {"read_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(ReadSentStep)), METH_FASTCALL,
     "Read a step from a message."},
    {"effort", EffortOf, METH_VARARGS, "Estimate the cost of a step that was read."},
    {"pack_applied", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(PackApplied)), METH_FASTCALL,
     "Return the decision about the last step, packed."},
    {"pack_events", PackEvents, METH_VARARGS, "Return events, packed."},
    {"removals", Removals, METH_O, "Count removed keys by reason."},
    {"set_hash_tail", SetHashTail, METH_VARARGS, "Set the tokens of a request that no hash covers."},
    {"answer_with", AnswerWith, METH_VARARGS, "Set the types of the objects in answers."},
    {"begin_save", BeginSave, METH_VARARGS, "Begin to write the image of a core."},
    {"load", LoadImage, METH_VARARGS, "Give a new core the state of an image."},
    {"events", Events, METH_VARARGS, "Return the events of a part."},
    {"find", Find, METH_VARARGS, "Find a cached prefix."},
    {"column", ColumnOf, METH_VARARGS, "Return a column of the requests."},
    {"live", LiveSlots, METH_VARARGS, "Return the slots that have a request."},
    {"request", RequestOf, METH_VARARGS, "Return what is known of a request besides the columns."},
    {"keys", KeysOf, METH_VARARGS, "Return stamps and keys of blocks."},
    {"blocks", BlocksOf, METH_VARARGS, "Return the blocks of a key."},
    {"first_blocks", FirstBlocks, METH_VARARGS, "Return the first block of a key in each group."},
    {"can_rewind", CanRewind, METH_VARARGS, "Whether tokens can be computed again."},
    {"align_chunk", AlignChunkOf, METH_VARARGS, "Shorten a chunk to where states can be cached."},
    {"books", Books, METH_VARARGS, "Return counters and records."},
    {"begin_end", BeginEnd, METH_VARARGS, "Begin to end an engine life."},
    {"enter_epoch", EnterEpoch, METH_VARARGS, "Begin an engine life."},
    {"prepare", Prepare, METH_VARARGS, "Build a pool of recovered keys."},
    {"install", InstallPool, METH_VARARGS, "Install recovered keys."},
    {"tiers", TiersOf, METH_VARARGS, "Return the slots of the tiers, and what happened to them."},
    {"tier_of", TierOf, METH_VARARGS, "Return the nearest tier that has a key."},
    {"tier_keys", TierKeys, METH_VARARGS, "Return the keys of a tier."},
    {"take_tier_events", TakeTierEvents, METH_VARARGS, "Return and clear the events of tiers."},
    {"install_slots", InstallSlots, METH_VARARGS, "Install recovered keys of the tiers."},
    {"take_events", TakeEvents, METH_VARARGS, "Return and clear the events since the last part."},
    {"store_empty_ranges", StoreEmptyRanges, METH_VARARGS, "Report empty registrations."},
    {"counts", Counts, METH_VARARGS, "Count the blocks of each group."},
    {"block_map", BlockMap, METH_VARARGS, "Count the blocks of each group and state by cell."},
    {"residency", ResidencyOf, METH_VARARGS, "Return histograms of block lifetimes."},
    {"common_blocks", CommonBlocks, METH_VARARGS, "Count the blocks that all running requests share."},
    {"free_order", FreeOrder, METH_VARARGS, "Return the free blocks in the order of eviction."},
    {"numbers", Numbers, METH_VARARGS, "Return numbers of the state."},
    {"open_step", OpenRows, METH_VARARGS, "Begin a step that is applied row by row."},
    {"close_step", CloseRows, METH_VARARGS, "End the open step."},
    {"flush_step", FlushRows, METH_VARARGS, "Return the answers of the open step so far."},
    {"decode_row", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(DecodeRow)), METH_FASTCALL,
     "Append what a running request gained, and grant it tokens."},
    {"extend_row", ExtendRow, METH_VARARGS, "Grant tokens to a running request."},
    {"update_row", UpdateRow, METH_VARARGS, "Apply a row of facts."},
    {"cache_row", CacheRow, METH_VARARGS, "Apply a cache section."},
    {"add_row", AddRow, METH_VARARGS, "Put a new request into a slot."},
    {"admit_row", AdmitOneRow, METH_VARARGS, "Admit a waiting request."},
    {"is_granted", IsGranted, METH_VARARGS, "Whether a slot runs in the open step."},
    {"look_up", LookUpSlot, METH_VARARGS, "Find the cached prefix of a request, up to a limit."},
    {"find_each", FindEach, METH_VARARGS, "Find the cached prefix of each group by itself."},
    {"skipped", SkippedOf, METH_VARARGS, "Count the tokens that a window left behind."},
    {"needed", NeededOf, METH_VARARGS, "Count the free blocks that an allocation takes."},
    {"tables", TablesOf, METH_VARARGS, "Return the blocks of a slot."},
    {"take_blocks", TakeBlocks, METH_VARARGS, "Take free blocks."},
    {"touch_blocks", TouchBlocks, METH_VARARGS, "Add a reference to blocks."},
    {"begin_check", BeginCheck, METH_O, "Begin a check of the state."},
    {"advance", Advance, METH_O, "Do the next slice of a check, an image or an end."},
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
