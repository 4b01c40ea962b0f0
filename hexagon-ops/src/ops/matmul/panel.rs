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
        if lines.len() != layout.panel_lines() {
            return Err(Error::Length {
                what: "panel lines",
                have: lines.len(),
                want: layout.panel_lines(),
            });
        }
        let (quants, rest) = lines.split_at(layout.scale_plane_offset() / LINE_BYTES);
        let (scales, mins) = rest.split_at(layout.scale_plane_bytes() / LINE_BYTES);
        Ok(Self {
            layout,
            quants,
            scales,
            mins,
        })
    }

    /// Returns the layout of the panel.
    #[must_use]
    pub fn layout(&self) -> PanelLayout {
        self.layout
    }
}
