//! Division of a call into waves: everything of a wave is reserved, made and bound for all cores
//! before any of them runs.
//!
//! Between two waves all cores wait for each other, so a call has as few as contexts and memory
//! allow: one, but for the widest weights and the most segments of K.

use std::ops::Range;

use crate::rockchip::layout::WeightLayout;

/// Contexts of one shape that a core may have, as a part of all that it keeps: an 8B model has five
/// shapes and some M.
const PART_OF_A_SHAPE: usize = 32;

/// The runs of a core between two waits for the other cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wave {
    /// Chunks, counted from the first one of the core.
    pub(super) chunks: Range<usize>,
    /// Segments of K of each of these chunks.
    pub(super) segments: Range<usize>,
    /// The last one with these chunks: their results are complete after it.
    pub(super) is_last: bool,
}

/// One run of a wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The number of the context, among those of the shape.
    pub(super) context: usize,
    /// The number of the result, among those of the wave.
    pub(super) result: usize,
    /// The chunk, counted from the first one of the weights.
    pub(super) chunk: usize,
    /// The segment of K.
    pub(super) segment: usize,
}

impl Wave {
    /// Returns the runs of a core that computes the chunks `of_core`.
    pub(super) fn steps(
        &self,
        of_core: &Range<usize>,
        segments_of_chunk: usize,
    ) -> impl Iterator<Item = Step> + use<> {
        let (first, end, wave) = (of_core.start, of_core.end, self.clone());
        let per_chunk = wave.segments.len();
        wave.chunks
            .clone()
            .filter(move |chunk| first + chunk < end)
            .flat_map(move |chunk| {
                let (nth, segments) = (chunk - wave.chunks.start, wave.segments.clone());
                segments.clone().map(move |segment| Step {
                    context: nth * per_chunk + segment - segments.start,
                    result: nth * segments_of_chunk + segment,
                    chunk: first + chunk,
                    segment,
                })
            })
    }
}

/// Divides the runs of a core with `chunks` chunks.
///
/// - `contexts`: most that a core keeps
/// - `result_bytes`: those of one run; `results`: most that a core keeps, in bytes
pub(super) fn waves(
    layout: &WeightLayout,
    chunks: usize,
    contexts: usize,
    result_bytes: usize,
    results: usize,
) -> impl Iterator<Item = Wave> + use<> {
    let segments = layout.segments;
    let runs = (contexts / PART_OF_A_SHAPE).max(1);
    let at_once = (runs / segments)
        .min(results / (result_bytes * segments).max(1))
        .clamp(1, chunks.max(1));
    let segments_at_once = runs.min(segments);
    (0..chunks).step_by(at_once).flat_map(move |first| {
        (0..segments).step_by(segments_at_once).map(move |segment| {
            let end = (segment + segments_at_once).min(segments);
            Wave {
                chunks: first..(first + at_once).min(chunks),
                segments: segment..end,
                is_last: end == segments,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rules::Choice;
    use crate::rockchip::caps::RK3588;
    use crate::tensor::DType;

    /// All runs of a core, in order.
    fn runs(
        layout: &WeightLayout,
        of_core: Range<usize>,
        contexts: usize,
        results: usize,
    ) -> Vec<Vec<Step>> {
        let waves = waves(layout, of_core.len(), contexts, 1000, results);
        waves
            .map(|wave| wave.steps(&of_core, layout.segments).collect())
            .collect()
    }

    #[test]
    fn each_block_is_run_once_with_its_own_context_and_result() {
        for (choice, ne) in [
            (Choice::Int8, [576, 576, 1, 1]),
            (Choice::Fp16, [14336, 4096, 1, 1]),
            (Choice::Int4, [14336, 40_000, 1, 1]),
        ] {
            let layout = WeightLayout::new(&RK3588, Some(choice), DType::F16, ne).unwrap();
            for contexts in [16, 170, 512, 4096] {
                for results in [0, 3000, 1_000_000] {
                    let first = layout.chunks_per_core;
                    let of_core = first..(2 * first).min(layout.chunks);
                    let mut blocks = Vec::new();
                    for wave in runs(&layout, of_core.clone(), contexts, results) {
                        assert!(wave.len() <= (contexts / PART_OF_A_SHAPE).max(1));
                        for (nth, step) in wave.iter().enumerate() {
                            assert_eq!(step.context, nth);
                            blocks.push((step.chunk, step.segment));
                            let others = wave.iter().filter(|other| other.result == step.result);
                            assert_eq!(others.count(), 1);
                        }
                    }
                    let want = of_core.flat_map(|chunk| {
                        (0..layout.segments).map(move |segment| (chunk, segment))
                    });
                    assert_eq!(blocks, want.collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn usual_weights_take_one_wave() {
        for ne in [[576, 49152, 1, 1], [14336, 4096, 1, 1], [4096, 14336, 1, 1]] {
            let layout = WeightLayout::new(&RK3588, Some(Choice::Int8), DType::F16, ne).unwrap();
            let of_core = 0..layout.chunks_per_core;
            assert_eq!(runs(&layout, of_core, 512, 1_000_000).len(), 1, "{ne:?}");
        }
    }
}
