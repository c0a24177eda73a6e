"""The public modules have every name that they promise, under the path that they promise."""

from __future__ import annotations

import importlib

import pytest

import rlx

PROMISED = {
    "rlx": """
        Graph Session compile from_onnx grad jit jvp load lower optimize ops value_and_grad vmap
        Graph.constant Graph.input Graph.node Graph.output Graph.param
        Graph.set_outputs Session.compile
    """,
    "rlx.runtime.program": """
        CompiledProgram.bind CompiledProgram.decisions CompiledProgram.explain CompiledProgram.memory
        CompiledProgram.run CompiledProgram.save CompiledProgram.set_param
    """,
    "rlx.ir.module": """
        MirModule.as_graph MirModule.from_graph MirModule.into_graph MirModule.name MirModule.__len__
    """,
    "rlx.ir.lir": """
        LirBufferPlan LirBufferSlot LirFingerprint LirIoManifest LirModule LirViewAlias
        LirIoManifest.collect LirFingerprint.of
        LirBufferPlan.bytes_saved LirBufferPlan.check LirBufferPlan.is_view LirBufferPlan.lower_bound
        LirBufferPlan.nodes_in_phase LirBufferPlan.phase_of LirBufferPlan.sizes LirBufferPlan.slot
        LirBufferPlan.total_unshared_bytes
        LirModule.arena_size LirModule.as_graph LirModule.code_key LirModule.dynamic_symbols
        LirModule.fingerprint LirModule.from_text LirModule.has_dynamic_dims LirModule.into_graph
        LirModule.is_fully_static LirModule.load LirModule.name LirModule.plan LirModule.save
        LirModule.specialize LirModule.to_text
    """,
    "rlx.ir.phase": """
        Phase.EPILOGUE Phase.PROLOGUE Phase.STEADY_STATE PhaseSchedule derive_phases
        PhaseSchedule.get PhaseSchedule.nodes_in PhaseSchedule.nodes_in_ordered PhaseSchedule.set
        PhaseSchedule.iter PhaseSchedule.__len__
    """,
    "rlx.cost": """
        FusionBenefit GraphIoProfile IoFusionGate calibrate fusion_benefit host_sync_op_kinds
        profile_graph_io profile_graph_io_outputs
        FusionBenefit.score_ns FusionBenefit.should_fuse IoFusionGate.score_ps IoFusionGate.should_fuse
    """,
    "rlx.driver": """
        Buffer BufferHandle CommandStream Device DeviceArena SyncStream available_devices is_available
        read_typed_to_f32 write_typed_from_f32
        Buffer.to_device Buffer.to_host CommandStream.submit CommandStream.submit_and_wait
        CommandStream.wait DeviceArena.byte_offset DeviceArena.has_buffer DeviceArena.read
        DeviceArena.read_output_f32 DeviceArena.size_bytes DeviceArena.write DeviceArena.write_input_f32
    """,
    "rlx.driver.copy": """
        AsyncCopy BarrierToken DoubleBuffer RingBuffer SyncCopy ThreadCopy pipelined
        AsyncCopy.close AsyncCopy.drain AsyncCopy.issue AsyncCopy.wait
        DoubleBuffer.fill DoubleBuffer.pair DoubleBuffer.ready DoubleBuffer.swap
    """,
    "rlx.dist": """
        CollectiveError LengthMismatch LocalTransport MpiTransport OutOfBounds Rank RankFailed ReduceKind.SUM
        SharedMemoryTransport SymmetricBuffer SymmetricHeap SymmetricTransport Timeout TransportError
        UnknownRank all_gather all_reduce
        LocalTransport.fan_out SymmetricHeap.rank_view SymmetricTransport.abort SymmetricTransport.alloc
        SymmetricTransport.barrier SymmetricTransport.get SymmetricTransport.put
        SymmetricTransport.put_signal SymmetricTransport.view SymmetricTransport.wait_signal
    """,
    "rlx.onnx_backend": "prepare run_model run_node supports_device",
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_are_there(module: str) -> None:
    missing = []
    for path in PROMISED[module].split():
        held: object = importlib.import_module(module)
        for name in path.split("."):
            held = getattr(held, name, None)
        if held is None:
            missing.append(path)
    assert not missing, f"{module} has lost {missing}"


def test_a_graph_has_its_nodes_and_outputs() -> None:
    g = rlx.Graph("g")
    g.output("y", g.input("x", (2,), "f32"))
    assert len(list(g.nodes)) == 1 and list(g.outputs) == ["y"]


PACKAGES = ("rlx", "rlx.ops", "rlx.cost", "rlx.driver", "rlx.driver.copy", "rlx.dist", "rlx.ir.op")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_listed_name_imports(package: str) -> None:
    held = importlib.import_module(package)
    assert held.__all__
    assert not [name for name in held.__all__ if not hasattr(held, name)]
