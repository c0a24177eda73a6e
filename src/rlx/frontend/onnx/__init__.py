"""ONNX models as graphs: `from_onnx`, and `AdaptiveModel` for models whose inputs decide shapes by value."""

from __future__ import annotations

from rlx.frontend.onnx.importer import Imported, from_onnx, import_model

__all__ = ["Imported", "from_onnx", "import_model"]
