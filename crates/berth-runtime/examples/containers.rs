//! For the tests of the runtime: the launcher of containers, and a parent that starts containers and can be killed.
//!
//! `containers DIRECTORY SPEC…` starts the containers of the JSON files, writes a line, and stays.

use std::path::Path;

use berth_runtime::{Processes, Runtime as _};

fn main() {
    berth_host::helper::intercept(&[berth_runtime::LAUNCHER]);
    let mut arguments = std::env::args_os().skip(1);
    let directory = arguments.next().expect("the first argument is a directory");
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("tokio starts");
    tokio.block_on(async {
        let program = std::env::current_exe().expect("there is /proc");
        let runtime = Processes::open(Path::new(&directory), &program).expect("the directory opens");
        for file in arguments {
            let spec = std::fs::read(file).expect("the file can be read");
            runtime.start(serde_json::from_slice(&spec).expect("it is a spec")).await.expect("it starts");
        }
        println!("started");
        std::future::pending::<()>().await;
    });
}
