//! For the tests of the node: the launcher of containers.

fn main() {
    berth_host::helper::intercept(&[berth_runtime::LAUNCHER]);
}
