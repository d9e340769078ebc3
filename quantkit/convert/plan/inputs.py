"""The token windows that a conversion reads, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.calibrate.data import CalibrationWindows


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Calibration windows by purpose, None where nothing reads any.

    Windows that the model writes itself (``--calibration self``) have ids on the meta device until they are written.

    calibration: for the statistics of the method and of the KV cache.
    distil: for the end-to-end pass after the blocks.
    sensitivity: for measuring sensitivity alone, where the method itself reads no text.
    """

    calibration: CalibrationWindows | None = None
    distil: CalibrationWindows | None = None
    sensitivity: CalibrationWindows | None = None

    @property
    def for_sensitivity(self) -> CalibrationWindows | None:
        """Return the windows that sensitivity is measured on."""
        return self.sensitivity or self.calibration

    @property
    def must_be_written(self) -> bool:
        """Return True while the model has yet to write its own calibration text."""
        return self.calibration is not None and self.calibration.ids.is_meta

    @property
    def run_model(self) -> bool:
        """Return True if the model runs over a text at all."""
        return self.calibration is not None or self.distil is not None

    def written(self, text: CalibrationWindows, samples: int) -> Inputs:
        """Return the inputs with the text that the model wrote.

        The first ``samples`` windows are for calibration, the rest for the end-to-end pass.
        """
        distil = None if self.distil is None else replace(text, ids=text.ids[samples:])
        return replace(self, calibration=replace(text, ids=text.ids[:samples]), distil=distil)
