//! The sizes of a model, from its metadata.

use ggml_rust_npu::gguf::{GgmlType, Header, TensorInfo};

use crate::ToolError;

/// Architectures for which it is known which tensors read which.
pub const ARCHITECTURES: [&str; 5] = ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3"];

/// Sizes of the attention.
#[derive(Clone, Copy, Debug)]
pub struct HeadSizes {
    /// Query heads.
    pub count: usize,
    /// Number of query heads that share a head of K and V.
    pub sharing: usize,
    /// Elements of a head of V.
    pub size: usize,
}

/// Returns the architecture, if it is one of [`ARCHITECTURES`].
///
/// # Errors
/// Text that names it.
pub fn architecture(header: &Header) -> Result<&str, ToolError> {
    let name = header
        .get("general.architecture")
        .and_then(|value| value.as_str());
    let name = name.ok_or("general.architecture is not set: this is no model")?;
    if ARCHITECTURES.contains(&name) {
        return Ok(name);
    }
    let known = ARCHITECTURES.join(", ");
    Err(format!("architecture {name} is not supported, only {known}").into())
}

/// Returns a number of the architecture's, such as `block_count`; `None` if it is not set.
///
/// # Errors
/// Text that names the key and its value, if that is not a number from 1 to 2^32 - 1.
fn optional(header: &Header, key: &str) -> Result<Option<usize>, ToolError> {
    let key = format!("{}.{key}", architecture(header)?);
    let Some(value) = header.get(&key) else {
        return Ok(None);
    };
    // SOURCE: llama.cpp reads these keys as 32-bit unsigned integers.
    let number = value
        .as_usize()
        .filter(|number| (1..=u32::MAX as usize).contains(number));
    let number = number.ok_or_else(|| format!("{key} is {value}, no number from 1 to 2^32 - 1"))?;
    Ok(Some(number))
}

/// Returns a number of the architecture's that must be set.
///
/// # Errors
/// Text that names the key and its value, if that is not a number from 1 to 2^32 - 1.
pub fn number(header: &Header, key: &str) -> Result<usize, ToolError> {
    let name = architecture(header)?;
    optional(header, key)?.ok_or_else(|| format!("{name}.{key} is missing").into())
}

/// Returns the matrix of a name, in a type that can be read as numbers.
///
/// - `option`: the option that needs it
///
/// # Errors
/// Text that names the tensor, if it is missing or something else.
pub fn matrix<'a>(
    header: &'a Header,
    name: &str,
    option: &str,
) -> Result<&'a TensorInfo, ToolError> {
    of_dims(header, name, 2, option)
}

/// Returns the matrices of a name, one for each expert, in a type that can be read as numbers.
///
/// # Errors
/// As [`matrix`].
pub fn experts<'a>(
    header: &'a Header,
    name: &str,
    option: &str,
) -> Result<&'a TensorInfo, ToolError> {
    of_dims(header, name, 3, option)
}

fn of_dims<'a>(
    header: &'a Header,
    name: &str,
    wanted: usize,
    option: &str,
) -> Result<&'a TensorInfo, ToolError> {
    let tensor =
        (header.tensor(name)).ok_or_else(|| format!("{name} is missing, which {option} needs"))?;
    let dims = tensor.dims;
    if dims != wanted {
        return Err(format!("{name} has {dims} dimensions, {option} needs {wanted}").into());
    }
    unquantized(tensor, option)
}

/// Returns the norm or bias with this name. Its type must be one that can be read as numbers.
///
/// - `len`: elements that it must have
/// - `option`: the option that needs it
///
/// # Errors
/// Text that names the tensor, if it is missing or something else.
pub fn vector<'a>(
    header: &'a Header,
    name: &str,
    len: usize,
    option: &str,
) -> Result<&'a TensorInfo, ToolError> {
    let tensor =
        (header.tensor(name)).ok_or_else(|| format!("{name} is missing, which {option} needs"))?;
    if tensor.dims != 1 || tensor.ne[0] != len {
        let shape = &tensor.ne[..tensor.dims];
        return Err(format!("{name} has the shape {shape:?}, {option} needs [{len}]").into());
    }
    unquantized(tensor, option)
}

/// Types that are read as numbers.
pub const UNQUANTIZED: [GgmlType; 3] = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];

fn unquantized<'a>(tensor: &'a TensorInfo, option: &str) -> Result<&'a TensorInfo, ToolError> {
    if UNQUANTIZED.contains(&tensor.dtype) {
        return Ok(tensor);
    }
    let (name, dtype) = (&tensor.name, tensor.dtype.name());
    Err(format!("{name} is {dtype}, {option} needs F32, F16 or BF16").into())
}

/// Returns the sizes of the attention.
///
/// # Errors
/// Text about sizes that do not fit together.
pub fn heads(header: &Header) -> Result<HeadSizes, ToolError> {
    let count = number(header, "attention.head_count")?;
    let kv_heads = optional(header, "attention.head_count_kv")?.unwrap_or(count);
    if !count.is_multiple_of(kv_heads) {
        return Err(format!("{count} heads cannot share {kv_heads} heads of K and V").into());
    }
    let size = match optional(header, "attention.value_length")? {
        Some(size) => size,
        None => {
            let channels = number(header, "embedding_length")?;
            if channels < count {
                return Err(
                    format!("embedding_length is {channels}, less than {count} heads").into(),
                );
            }
            channels / count
        }
    };
    Ok(HeadSizes {
        count,
        sharing: count / kv_heads,
        size,
    })
}
