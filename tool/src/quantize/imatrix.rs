//! Files of llama-imatrix: for each weight, the mean square of each of its inputs.

use std::collections::HashMap;
use std::path::Path;

use ggml_rust_npu::gguf::{File, GgmlType, TensorInfo, TensorPlan, Writer};

use super::block::to_f32;
use super::transform::Transforms;
use crate::ToolError;
use crate::files::{Files, named};

/// Statistics by the weight's name.
#[derive(Debug)]
pub struct Imatrix(HashMap<String, Statistics>);

/// The statistics of a weight.
#[derive(Debug)]
struct Statistics {
    /// Mean square of each input, expert by expert.
    means: Vec<f32>,
    /// Rows of activations that each expert got.
    counts: Vec<f32>,
}

// SOURCE: tools/imatrix/imatrix.cpp of llama.cpp 0.5.0, and common/imatrix-loader.cpp of 0.6.0,
// which also reads sums of the inputs.
const SUMS: &str = ".in_sum2";
const PLAIN_SUMS: &str = ".in_sum";
const COUNTS: &str = ".counts";

impl Imatrix {
    /// Reads a file that llama-imatrix wrote.
    ///
    /// # Errors
    /// Text that names the file and its mistake.
    pub fn open(inputs: &mut Files, path: &Path) -> Result<Self, ToolError> {
        let file = (inputs.gguf(path)).map_err(|error| {
            format!("{error} (llama-imatrix writes an imatrix file in GGUF format)")
        })?;
        let kind = file.header().get("general.type");
        if kind.and_then(|kind| kind.as_str()) != Some("imatrix") {
            return Err(format!("{}: general.type is not imatrix", path.display()).into());
        }
        let mut found = HashMap::new();
        for tensor in &file.header().tensors {
            let Some(name) = tensor.name.strip_suffix(SUMS) else {
                continue;
            };
            let counts = file.header().tensor(&format!("{name}{COUNTS}"));
            let counts =
                counts.ok_or_else(|| format!("{}: {name} has no counts", path.display()))?;
            let counts = values(&file, counts)?;
            if counts.len() != tensor.rows() {
                let (have, want) = (counts.len(), tensor.rows());
                let path = path.display();
                return Err(format!("{path}: {name} has {have} counts for {want} matrices").into());
            }
            let mut means = values(&file, tensor)?;
            let experts = means.chunks_exact_mut(tensor.ne[0].max(1)).zip(&counts);
            for (means, count) in experts {
                if counts.len() > 1 && *count == 0.0 {
                    // The text never reached this expert, so all its inputs get the same weight, as
                    // in llama-quantize.
                    means.fill(1.0);
                } else {
                    means.iter_mut().for_each(|sum| *sum /= count);
                }
            }
            let usable = |mean: &f32| mean.is_finite() && *mean >= 0.0;
            if !means.iter().all(usable) {
                return Err(format!("{}: {name} has no usable statistics", path.display()).into());
            }
            found.insert(name.to_owned(), Statistics { means, counts });
        }
        if found.is_empty() {
            return Err(format!("{}: no statistics of any weight", path.display()).into());
        }
        Ok(Self(found))
    }

    /// Returns `true` if there are statistics of a weight.
    pub fn has(&self, weight: &TensorInfo) -> bool {
        self.0.contains_key(&weight.name)
    }

    /// Returns the mean square of each input of a weight, expert by expert.
    ///
    /// # Errors
    /// Text, if the weight is not in the file, or with another number of inputs.
    pub fn of(&self, weight: &TensorInfo) -> Result<&[f32], ToolError> {
        Ok(&self.statistics(weight)?.means)
    }

    /// Returns the mean square of each input of a weight, of all experts together.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_all_experts(&self, weight: &TensorInfo) -> Result<Vec<f32>, ToolError> {
        let statistics = self.statistics(weight)?;
        let shares = self.shares(weight)?;
        let mut all = vec![0.0; weight.ne[0]];
        for (means, share) in statistics.means.chunks_exact(all.len()).zip(shares) {
            all.iter_mut()
                .zip(means)
                .for_each(|(sum, mean)| *sum += share * mean);
        }
        Ok(all)
    }

    /// Returns the share of each expert in the rows of activations; all of them have the same if
    /// there were none.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn shares(&self, weight: &TensorInfo) -> Result<Vec<f32>, ToolError> {
        let experts = weight.ne[2] * weight.ne[3];
        let counts: Vec<f32> = (0..experts)
            .map(|expert| self.count(weight, expert))
            .collect::<Result<_, _>>()?;
        let sum: f32 = counts.iter().sum();
        // CAST: an estimate.
        let share = |count: &f32| match sum > 0.0 {
            true => count / sum,
            false => 1.0 / experts as f32,
        };
        Ok(counts.iter().map(share).collect())
    }

    /// Returns the number of activation rows of an expert. A file that llama-imatrix converted from
    /// its older format has a single number, that of the expert with the most rows; llama-imatrix
    /// uses it for each expert when it continues such a file.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn count(&self, weight: &TensorInfo, expert: usize) -> Result<f32, ToolError> {
        let counts = &self.statistics(weight)?.counts;
        Ok(match counts[..] {
            [of_each] => of_each,
            _ => counts.get(expert).copied().unwrap_or(0.0),
        })
    }

    fn statistics(&self, weight: &TensorInfo) -> Result<&Statistics, ToolError> {
        let (name, [k, _, s2, s3]) = (&weight.name, weight.ne);
        let found = (self.0.get(name))
            .ok_or_else(|| format!("the imatrix says nothing of {name}: is it of this model?"))?;
        let (have, want) = (found.means.len(), k * s2 * s3);
        if have != want {
            return Err(format!("{name} has {want} inputs, and {have} in the imatrix").into());
        }
        Ok(found)
    }
}

/// Writes an imatrix file for the transformed model: the statistics of `from`, of inputs after
/// their scaling.
///
/// # Errors
/// Text that names the file and its mistake.
pub fn rescale(from: &Path, to: &Path, transforms: &Transforms) -> Result<(), ToolError> {
    let file = File::open(from).map_err(|error| named(from, &error))?;
    let header = file.header();
    let plans: Vec<TensorPlan> = (header.tensors.iter())
        .map(|tensor| TensorPlan {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            ne: tensor.ne[..tensor.dims].to_vec(),
        })
        .collect();
    let mut writer = Writer::create(to, header, file.bytes(), &[], &plans)?;
    for tensor in &header.tensors {
        let transform = |suffix| {
            let name = tensor.name.strip_suffix(suffix);
            name.and_then(|name| transforms.get(name))
        };
        let sums = match (transform(SUMS), transform(PLAIN_SUMS)) {
            (Some(transform), _) => Some(transform.importance(&values(&file, tensor)?)),
            (_, Some(transform)) => Some(transform.inputs(&values(&file, tensor)?)),
            _ => None,
        };
        match sums {
            Some(sums) => writer.tensor([sums
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect::<Vec<_>>()])?,
            None => writer.tensor([file.data(tensor)])?,
        }
    }
    Ok(writer.finish()?)
}

fn values(file: &File, tensor: &TensorInfo) -> Result<Vec<f32>, ToolError> {
    if tensor.dtype != GgmlType::F32 {
        let (path, dtype) = (file.path().display(), tensor.dtype.name());
        return Err(format!("{path}: {} is {dtype}, not F32", tensor.name).into());
    }
    let mut values = vec![0.0; tensor.ne[0] * tensor.rows()];
    to_f32(tensor.dtype, file.data(tensor), &mut values);
    Ok(values)
}
