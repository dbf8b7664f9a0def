//! The `berth` binary: reads the command line, wires the roles together, and stops them in order.

mod apiserver;
mod cli;
mod demo;
mod down;
mod driver;
mod explain;
mod http;
mod logging;
mod machine;
mod sidecars;
mod stack;
mod status;
mod timeline;
mod up;

use std::process::ExitCode;
use std::time::Duration;

use berth_host::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    // A container of `berth up` is this program too, and small as long as nothing else has started.
    berth_runtime::intercept();
    // And so is what mounts what may not answer.
    berth_host::remote::intercept();
    // And so is whatever serves an NFS share through FUSE.
    berth_fuse::intercept();
    // And what works on images there.
    berth_backends::nfs::intercept();
    let command = cli::parse(std::env::args_os());
    // Every container and every connection is a few files, and the usual soft limit is small for a node.
    if let Err(error) = berth_host::limits::raise_open_files() {
        eprintln!("berth: {}", error.sentence());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_secs(2))
        .build()
        .expect("the runtime starts on every Linux");
    match runtime.block_on(command.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("berth: {error:#}");
            ExitCode::FAILURE
        }
    }
}
