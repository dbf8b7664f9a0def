//! How a volume is used: as a filesystem or a raw device, by whom at a time.

use std::fmt;

/// From where and by whom a volume may be used at a time: the access modes of CSI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AccessMode {
    /// Read and written on one node, by any number of workloads.
    SingleNodeWriter,
    /// Read on one node.
    SingleNodeReaderOnly,
    /// Read on many nodes.
    MultiNodeReaderOnly,
    /// Read on many nodes, written on one.
    MultiNodeSingleWriter,
    /// Read and written on many nodes.
    MultiNodeMultiWriter,
    /// Read and written by one workload on one node (Kubernetes' ReadWriteOncePod).
    SingleNodeSingleWriter,
    /// Read and written by many workloads on one node.
    SingleNodeMultiWriter,
}

impl AccessMode {
    /// Every mode there is, in the order of the protocol.
    pub const ALL: [Self; 7] = [
        Self::SingleNodeWriter,
        Self::SingleNodeReaderOnly,
        Self::MultiNodeReaderOnly,
        Self::MultiNodeSingleWriter,
        Self::MultiNodeMultiWriter,
        Self::SingleNodeSingleWriter,
        Self::SingleNodeMultiWriter,
    ];

    /// Whether the volume may be on one node only at a time.
    pub fn is_single_node(self) -> bool {
        matches!(
            self,
            Self::SingleNodeWriter
                | Self::SingleNodeReaderOnly
                | Self::SingleNodeSingleWriter
                | Self::SingleNodeMultiWriter
        )
    }

    /// Whether nobody may write.
    pub fn is_read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }
}

/// Filesystem or raw device, without the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// A raw block device.
    Block,
    /// The volume is used as a mounted filesystem.
    Mount,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Block => "block",
            Self::Mount => "mount",
        })
    }
}

/// Filesystem or raw device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A raw block device.
    Block,
    /// The volume is used as a mounted filesystem, in this way.
    Mount {
        /// The filesystem asked for; the driver's choice where empty.
        fs_type: String,
        /// The mount options that the class and the volume ask for.
        flags: Vec<String>,
        /// The group that shall own the files, where the caller leaves that to the driver.
        group: Option<u32>,
    },
}

impl Access {
    /// Filesystem or raw device, without the details.
    pub fn kind(&self) -> AccessKind {
        match self {
            Self::Block => AccessKind::Block,
            Self::Mount { .. } => AccessKind::Mount,
        }
    }
}

/// How a volume is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeCapability {
    /// Filesystem or raw device.
    pub access: Access,
    /// By whom at a time.
    pub mode: AccessMode,
}
