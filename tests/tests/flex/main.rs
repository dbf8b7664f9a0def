//! FlexVolume: anybody's drivers, served as CSI drivers.

mod adapter;
