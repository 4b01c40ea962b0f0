//! A packed panel as the kernels see it: one slice per plane.

use crate::error::{Error, Result};
use crate::layout::{LINE_BYTES, Line, PanelLayout};

/// The planes of one panel; see the picture in [`crate::layout`].
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a> {
    pub(super) layout: PanelLayout,
    pub(super) quants: &'a [Line],
    pub(super) scales: &'a [Line],
    pub(super) mins: &'a [Line],
}

impl<'a> Panel<'a> {
    /// Splits a panel into its planes.
    ///
    /// # Errors
    /// `Length` if `lines` is not [`PanelLayout::panel_lines`] long.
    pub fn new(layout: PanelLayout, lines: &'a [Line]) -> Result<Self> {
        PanelPlanes::new(layout).panel(lines)
    }

    /// Returns the layout of the panel.
    #[must_use]
    pub fn layout(&self) -> PanelLayout {
        self.layout
    }
}

/// The planes of all panels of a layout, which are computed once for many panels.
#[derive(Clone, Copy)]
pub(super) struct PanelPlanes {
    layout: PanelLayout,
    /// Lines of a panel, and those at which its scales and minima start.
    pub(super) lines: usize,
    scales: usize,
    mins: usize,
}

impl PanelPlanes {
    pub(super) fn new(layout: PanelLayout) -> Self {
        let scales = layout.scale_plane_offset() / LINE_BYTES;
        Self {
            layout,
            lines: layout.panel_lines(),
            scales,
            mins: scales + layout.scale_plane_bytes() / LINE_BYTES,
        }
    }

    /// Splits two panels that follow each other into their planes.
    ///
    /// # Errors
    /// As [`Panel::new`].
    #[inline(always)]
    pub(super) fn pair<'a>(&self, lines: &'a [Line]) -> Result<[Panel<'a>; 2]> {
        let (first, second) = lines.split_at(self.lines.min(lines.len()));
        Ok([self.panel(first)?, self.panel(second)?])
    }

    /// Returns the plane of scales of a panel; nothing of one that is too short.
    pub(super) fn scales_mut<'a>(&self, lines: &'a mut [Line]) -> &'a mut [Line] {
        lines.get_mut(self.scales..self.mins).unwrap_or_default()
    }

    /// Splits a panel into its planes.
    ///
    /// # Errors
    /// As [`Panel::new`].
    #[inline(always)]
    pub(super) fn panel<'a>(&self, lines: &'a [Line]) -> Result<Panel<'a>> {
        let planes = (
            lines.get(..self.scales),
            lines.get(self.scales..self.mins),
            lines.get(self.mins..),
        );
        match planes {
            (Some(quants), Some(scales), Some(mins)) if lines.len() == self.lines => Ok(Panel {
                layout: self.layout,
                quants,
                scales,
                mins,
            }),
            _ => Err(Error::Length {
                what: "panel lines",
                have: lines.len(),
                want: self.lines,
            }),
        }
    }
}
