//! FlexVolume, for both sides: call-outs, replies, running a driver's executable, and finding drivers.
//!
//! A FlexVolume driver is an executable at `vendor~driver/driver` in a plugin directory. It is run once for each
//! operation, with the operation's name and its arguments on the command line, one of them a JSON document, and prints
//! one JSON document. The node and the attach-detach controller call drivers through this crate, and Berth's own driver
//! answers with the same types. It knows neither Kubernetes objects nor CSI.
//!
//! ```text
//!  node, attach-detach controller                          driver
//!  Drivers::get ─► Driver::call ─► berth_host::exec ─► executable CALL ARGUMENT… ─► Call::parse
//!     ▲ inotify, init                   Reply::parse ◄───── one JSON document ◄──── Reply
//! ```
//!
//! ```no_run
//! use berth_flex::{Call, Driver, DriverName, Options, Timeouts};
//!
//! # async fn mount() -> Result<(), Box<dyn std::error::Error>> {
//! let name: DriverName = "k8s/nfs".parse()?;
//! let driver = Driver::init(name, "/plugins/k8s~nfs/nfs".into(), Timeouts::default()).await?;
//! let user = [("server".to_owned(), "192.0.2.7".to_owned()), ("share".to_owned(), "/export".to_owned())];
//! let options = Options::new(&user.into(), "nfs", false, "pv-1")?;
//! let answered = driver.call(Call::Mount { directory: "/mnt/x".into(), options }).await?;
//! println!("{}", if answered.is_some() { "mounted" } else { "not supported" });
//! # Ok(())
//! # }
//! ```
//!
//! | type | what it is for |
//! |---|---|
//! | [`Call`], [`Options`] | a call-out with its arguments, in the kubelet's order; the JSON document |
//! | [`Reply`], [`Status`], [`Capabilities`] | what a driver prints |
//! | [`Driver`], [`run`], [`Timeouts`] | an executable that answered `init`, and one run of it |
//! | [`DriverName`], [`Drivers`] | `vendor/driver`, and the drivers of a plugin directory as they come and go |
//!
//! What holds:
//! - Arguments, their order and the document's bytes are the kubelet's (`call.rs`, `options.rs`).
//! - A call ends at its deadline, with all of its process group, and keeps no thread that others need.
//! - A reply is one JSON object, read as Go reads it: names of fields in any case, `status` exact, unknown fields ignored.
//! - No value of a Secret is formatted, nor repeated from what a driver printed.
//!
//! Start reading at `driver.rs`.

mod call;
mod directory;
mod driver;
mod name;
mod options;
mod reply;

pub use call::{ArgumentError, Call};
pub use directory::Drivers;
pub use driver::{Driver, Error, Timeouts, run};
pub use name::{DriverName, InvalidName};
pub use options::{Options, PodInfo, ReservedOption};
pub use reply::{Capabilities, Reply, ReplyError, Status};

/// Where the kubelet looks for drivers unless it is given another directory.
pub const KUBELET_PLUGIN_DIRECTORY: &str = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec";
