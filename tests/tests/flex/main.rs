//! FlexVolume: Berth's own drivers, called as the kubelet calls them, and anybody's served as CSI drivers; leaving it.

mod adapter;
mod driver;
mod migrate;
