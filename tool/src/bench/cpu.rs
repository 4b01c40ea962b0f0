//! Times of the CPU, measured by llama.cpp itself: the output of `test-backend-ops perf -b CPU -o
//! MUL_MAT`.

use std::path::Path;

use regex_lite::Regex;

use super::{LARGEST_M, LARGEST_SIZE};
use crate::ToolError;
use crate::files::Files;

/// A line of the output: `dst[M,N] = act[M,K] · w[K,N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Time {
    /// Type of the weights, as ggml spells it.
    pub dtype: String,
    /// M, K and N.
    pub shape: [usize; 3],
    /// Time of one multiplication.
    pub microseconds: f64,
}

/// Longest line that is looked at.
const MAX_LINE_BYTES: usize = 4096;

/// Reads the output of test-backend-ops.
///
/// # Errors
/// Text that names the file, if it cannot be read, has no such line, or has one with an impossible
/// number.
pub fn read(inputs: &mut Files, path: &Path) -> Result<Vec<Time>, ToolError> {
    let text = inputs.text(path)?;
    let times = parse(&text).map_err(|reason| format!("{}: {reason}", path.display()))?;
    if times.is_empty() {
        let name = path.display();
        return Err(format!(
            "{name}: no line of `test-backend-ops perf -b CPU -o MUL_MAT` is in it"
        )
        .into());
    }
    Ok(times)
}

/// Returns the lines of plain multiplications; other lines are skipped. ggml's m is N here, and its
/// n is M.
// SOURCE: test_mul_mat::vars() and eval_perf in tests/test-backend-ops.cpp of llama.cpp 0.5.0.
fn parse(text: &str) -> Result<Vec<Time>, String> {
    let line = Regex::new(
        r"MUL_MAT\(type_a=(\w+),type_b=f32,m=(\d+),n=(\d+),k=(\d+),bs=\[1,1\],nr=\[1,1\],per=\[0,1,2,3\],k_v=0,o=1,[^)]*\):\s+\d+ runs\s+-\s+([\d.]+) us/run",
    );
    // PANIC: it is constant, and the test below uses it.
    let line = line.expect("a regular expression");
    let time = |found: regex_lite::Captures| {
        let size = |name: &str, index: usize, largest: usize| {
            let size = found[index].parse().ok();
            let size = size.filter(|size| (1..=largest).contains(size));
            let number = &found[index];
            size.ok_or_else(|| format!("{name}={number} is not from 1 to {largest}"))
        };
        let time = found[5].parse().ok();
        let time = time.filter(|time: &f64| time.is_normal());
        Ok(Time {
            dtype: found[1].to_owned(),
            shape: [
                size("n", 3, LARGEST_M)?,
                size("k", 4, LARGEST_SIZE)?,
                size("m", 2, LARGEST_SIZE)?,
            ],
            microseconds: time.ok_or_else(|| format!("{} us/run is no time", &found[5]))?,
        })
    };
    // Longer lines are skipped, because the time of the search grows with the square of a line's
    // length.
    let lines = text.lines().filter(|text| text.len() <= MAX_LINE_BYTES);
    lines
        .filter_map(|text| line.captures(text))
        .map(time)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_plain_multiplications_are_read() {
        let text = "Backend 2/2: CPU\n  Device description: AMD EPYC\n\
            MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n=5,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0):\
            \x20                   852 runs -  1234.56 us/run - 117.44 MFLOP/run - \x1b[1;34m 95.13 GFLOPS\x1b[0m\n\
            MUL_MAT(type_a=f16,type_b=f32,m=16416,n=1,k=128,bs=[8,1],nr=[4,1],per=[0,2,1,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0): \
            852 runs - 10.0 us/run\nADD(type=f32): 1 runs - 2.0 us/run\n";
        let want = Time {
            dtype: "q4_0".into(),
            shape: [5, 14336, 4096],
            microseconds: 1234.56,
        };
        assert_eq!(parse(text).unwrap(), [want]);
        // With more rows, activations and results would be a GiB each.
        let many = parse(&text.replace("n=5,", "n=65537,")).unwrap_err();
        assert_eq!(many, "n=65537 is not from 1 to 65536");
    }
}
