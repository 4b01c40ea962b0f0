//! A pack file made by hand.

use xxhash_rust::xxh3::xxh3_128;

/// A file written by hand, so that the reader is not tested with the writer of the same project
/// only.
#[derive(Clone)]
pub struct Raw {
    pub magic: [u8; 8],
    pub version: u32,
    pub reserved: u32,
    pub tensors: Option<u64>,
    pub table_bytes: Option<u64>,
    pub file_bytes: Option<u64>,
    pub hash_change: u128,
    pub chip: Vec<u8>,
    pub entries: Vec<RawEntry>,
    pub behind_table: Vec<u8>,
    pub data_bytes: usize,
}

#[derive(Clone)]
pub struct RawEntry {
    pub name: Vec<u8>,
    pub dtype: u32,
    pub ne: [u64; 4],
    pub offset: u64,
    pub bytes: u64,
    pub scales: u64,
    pub error: f64,
}

fn text(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat()
}

impl RawEntry {
    fn bytes(&self) -> Vec<u8> {
        let mut out = text(&self.name);
        out.extend(self.dtype.to_le_bytes());
        out.extend(0x4858_0201u32.to_le_bytes());
        self.ne
            .iter()
            .for_each(|size| out.extend(size.to_le_bytes()));
        (0..10u64).for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(7u128.to_le_bytes());
        out.extend(8u128.to_le_bytes());
        for number in [self.offset, self.bytes, self.scales] {
            out.extend(number.to_le_bytes());
        }
        out.extend(9u128.to_le_bytes());
        out.extend(self.error.to_le_bytes());
        out
    }
}

impl Raw {
    /// Two tensors, of 100 bytes with 3 scales and of 4096 bytes.
    pub fn good() -> Self {
        let entry = |name: &[u8], offset, bytes, scales| RawEntry {
            name: name.into(),
            dtype: 2,
            ne: [64, 2, 1, 1],
            offset,
            bytes,
            scales,
            error: 0.25,
        };
        Self {
            magic: *b"\x89NPUPACK",
            version: 1,
            reserved: 0,
            tensors: None,
            table_bytes: None,
            file_bytes: None,
            hash_change: 0,
            chip: b"rk3588".to_vec(),
            entries: vec![
                entry(b"a.weight", 4096, 100, 3),
                entry(b"b.weight", 8192, 4096, 0),
            ],
            behind_table: Vec::new(),
            data_bytes: 8192,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let entries: Vec<u8> = self.entries.iter().flat_map(RawEntry::bytes).collect();
        let table = [
            text(&self.chip),
            text(b"--rules x=int8"),
            entries,
            self.behind_table.clone(),
        ]
        .concat();
        let len = |set: Option<u64>, len: usize| set.unwrap_or(len as u64).to_le_bytes();
        let mut head = self.magic.to_vec();
        head.extend(self.version.to_le_bytes());
        head.extend(self.reserved.to_le_bytes());
        head.extend(len(self.tensors, self.entries.len()));
        head.extend(len(self.table_bytes, table.len()));
        head.extend(len(self.file_bytes, 4096 + self.data_bytes));
        let hash = xxh3_128(&[&head[..], &table].concat()) ^ self.hash_change;
        let mut file = [&head[..], &hash.to_le_bytes(), &table].concat();
        assert!(file.len() <= 4096);
        file.resize(4096, 0);
        file.extend((0..self.data_bytes).map(|i| u8::try_from(i % 251).unwrap()));
        file
    }
}
