//! The call-outs: what a driver is asked, with the arguments in the kubelet's order.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::options::Options;

/// What a driver is asked to do. Its `Debug` shows no value of a Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Says what the driver can do.
    Init,
    /// Gives a name of the volume that is the same on all nodes; the kubelet does not use it.
    GetVolumeName {
        /// The JSON document that describes the volume to the driver.
        options: Options,
    },
    /// Attaches the volume to a node.
    Attach {
        /// The JSON document that describes the volume to the driver.
        options: Options,
        /// The name of the Node object.
        node: String,
    },
    /// Detaches the volume from a node.
    Detach {
        /// The PersistentVolume's name, or the volume's name in the pod.
        volume: String,
        /// The name of the Node object.
        node: String,
    },
    /// Waits on the node until the device is there.
    WaitForAttach {
        /// The device's path, as `attach` gave it.
        device: String,
        /// The JSON document that describes the volume to the driver.
        options: Options,
    },
    /// Says whether the volume is attached to a node.
    IsAttached {
        /// The JSON document that describes the volume to the driver.
        options: Options,
        /// The name of the Node object.
        node: String,
    },
    /// Mounts the device on the node, once for all pods.
    MountDevice {
        /// Where to mount it.
        directory: PathBuf,
        /// The device's path, as `waitforattach` gave it.
        device: String,
        /// The JSON document that describes the volume to the driver.
        options: Options,
    },
    /// Unmounts the device that `mountdevice` has mounted on the node.
    UnmountDevice {
        /// Where it is mounted.
        directory: PathBuf,
    },
    /// Mounts the volume for a pod.
    Mount {
        /// Where to mount it.
        directory: PathBuf,
        /// The volume's options, with those of the pod and of the Secret.
        options: Options,
    },
    /// Unmounts a pod's volume.
    Unmount {
        /// Where it is mounted.
        directory: PathBuf,
    },
    /// Expands the storage; no version of Kubernetes calls it.
    ExpandVolume {
        /// The JSON document that describes the volume to the driver.
        options: Options,
        /// Where the device is mounted.
        directory: PathBuf,
        /// The size that is asked for, in bytes.
        new_size: u64,
        /// The size before, in bytes.
        old_size: u64,
    },
    /// Grows the filesystem on the node.
    ExpandFs {
        /// The JSON document that describes the volume to the driver.
        options: Options,
        /// The device's path; empty without attachment.
        device: String,
        /// Where the volume is mounted for a pod.
        directory: PathBuf,
        /// The size that is asked for, in bytes.
        new_size: u64,
        /// The size before, in bytes.
        old_size: u64,
    },
}

/// Why a command line is not a call-out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// The call-out has no such name; a driver answers `Not supported`.
    #[error("call-out {0:?} does not exist")]
    UnknownCall(String),
    /// There are too many or too few arguments.
    #[error("call-out {call:?} takes {expected} arguments and got {got}")]
    WrongCount {
        /// The name of the call-out.
        call: &'static str,
        /// How many arguments it takes.
        expected: usize,
        /// The number of arguments on the command line.
        got: usize,
    },
    /// An argument is not what it should be; its text is not repeated, as it may hold a Secret.
    #[error("argument {number} of call-out {call:?} is not {expected}")]
    Invalid {
        /// The name of the call-out.
        call: &'static str,
        /// Its place among the arguments, beginning with 1.
        number: usize,
        /// What it should be.
        expected: &'static str,
    },
}

impl Call {
    /// The name of the call-out, the first word of its command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::GetVolumeName { .. } => "getvolumename",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::WaitForAttach { .. } => "waitforattach",
            Self::IsAttached { .. } => "isattached",
            Self::MountDevice { .. } => "mountdevice",
            Self::UnmountDevice { .. } => "unmountdevice",
            Self::Mount { .. } => "mount",
            Self::Unmount { .. } => "unmount",
            Self::ExpandVolume { .. } => "expandvolume",
            Self::ExpandFs { .. } => "expandfs",
        }
    }

    /// The command line behind the executable: the name and the arguments.
    pub fn command_line(&self) -> Vec<OsString> {
        let json = |options: &Options| OsString::from(options.to_json());
        let number = |number: &u64| OsString::from(number.to_string());
        let mut line: Vec<OsString> = vec![self.name().into()];
        line.extend(match self {
            Self::Init => vec![],
            Self::GetVolumeName { options } => vec![json(options)],
            Self::Attach { options, node } | Self::IsAttached { options, node } => {
                vec![json(options), node.into()]
            }
            Self::Detach { volume, node } => vec![volume.into(), node.into()],
            Self::WaitForAttach { device, options } => vec![device.into(), json(options)],
            Self::MountDevice { directory, device, options } => {
                vec![directory.into(), device.into(), json(options)]
            }
            Self::UnmountDevice { directory } | Self::Unmount { directory } => vec![directory.into()],
            Self::Mount { directory, options } => vec![directory.into(), json(options)],
            Self::ExpandVolume { options, directory, new_size, old_size } => {
                vec![json(options), directory.into(), number(new_size), number(old_size)]
            }
            Self::ExpandFs { options, device, directory, new_size, old_size } => {
                vec![json(options), device.into(), directory.into(), number(new_size), number(old_size)]
            }
        });
        line
    }

    /// Reads the command line behind the executable, for drivers.
    pub fn parse(line: &[OsString]) -> Result<Self, ArgumentError> {
        let (name, arguments) =
            line.split_first().map_or((OsStr::new(""), line), |(name, rest)| (name, rest));
        let of = |call| Arguments { call, all: arguments };
        Ok(match name.to_str().unwrap_or_default() {
            "init" => {
                of("init").take::<0>()?;
                Self::Init
            }
            "getvolumename" => {
                let arguments = of("getvolumename").take::<1>()?;
                Self::GetVolumeName { options: arguments.options(0)? }
            }
            "attach" => {
                let arguments = of("attach").take::<2>()?;
                Self::Attach { options: arguments.options(0)?, node: arguments.text(1)? }
            }
            "detach" => {
                let arguments = of("detach").take::<2>()?;
                Self::Detach { volume: arguments.text(0)?, node: arguments.text(1)? }
            }
            "waitforattach" => {
                let arguments = of("waitforattach").take::<2>()?;
                Self::WaitForAttach { device: arguments.text(0)?, options: arguments.options(1)? }
            }
            "isattached" => {
                let arguments = of("isattached").take::<2>()?;
                Self::IsAttached { options: arguments.options(0)?, node: arguments.text(1)? }
            }
            "mountdevice" => {
                let arguments = of("mountdevice").take::<3>()?;
                Self::MountDevice {
                    directory: arguments.path(0)?,
                    device: arguments.text(1)?,
                    options: arguments.options(2)?,
                }
            }
            "unmountdevice" => Self::UnmountDevice { directory: of("unmountdevice").take::<1>()?.path(0)? },
            "mount" => {
                let arguments = of("mount").take::<2>()?;
                Self::Mount { directory: arguments.path(0)?, options: arguments.options(1)? }
            }
            "unmount" => Self::Unmount { directory: of("unmount").take::<1>()?.path(0)? },
            "expandvolume" => {
                let arguments = of("expandvolume").take::<4>()?;
                Self::ExpandVolume {
                    options: arguments.options(0)?,
                    directory: arguments.path(1)?,
                    new_size: arguments.number(2)?,
                    old_size: arguments.number(3)?,
                }
            }
            "expandfs" => {
                let arguments = of("expandfs").take::<5>()?;
                Self::ExpandFs {
                    options: arguments.options(0)?,
                    device: arguments.text(1)?,
                    directory: arguments.path(2)?,
                    new_size: arguments.number(3)?,
                    old_size: arguments.number(4)?,
                }
            }
            _ => return Err(ArgumentError::UnknownCall(name.to_string_lossy().into_owned())),
        })
    }

    /// The JSON document that the call-out carries.
    pub fn options(&self) -> Option<&Options> {
        match self {
            Self::Init | Self::Detach { .. } | Self::UnmountDevice { .. } | Self::Unmount { .. } => None,
            Self::GetVolumeName { options }
            | Self::Attach { options, .. }
            | Self::WaitForAttach { options, .. }
            | Self::IsAttached { options, .. }
            | Self::MountDevice { options, .. }
            | Self::Mount { options, .. }
            | Self::ExpandVolume { options, .. }
            | Self::ExpandFs { options, .. } => Some(options),
        }
    }
}

/// The arguments of a call-out.
struct Arguments<'a> {
    call: &'static str,
    all: &'a [OsString],
}

impl Arguments<'_> {
    /// Checks that there are as many as the call-out takes.
    fn take<const COUNT: usize>(self) -> Result<Self, ArgumentError> {
        let got = self.all.len();
        if got == COUNT {
            Ok(self)
        } else {
            Err(ArgumentError::WrongCount { call: self.call, expected: COUNT, got })
        }
    }

    fn invalid(&self, at: usize, expected: &'static str) -> ArgumentError {
        ArgumentError::Invalid { call: self.call, number: at + 1, expected }
    }

    fn text(&self, at: usize) -> Result<String, ArgumentError> {
        self.all[at].to_str().map(str::to_owned).ok_or_else(|| self.invalid(at, "UTF-8"))
    }

    fn options(&self, at: usize) -> Result<Options, ArgumentError> {
        Options::parse(&self.text(at)?).map_err(|_| self.invalid(at, "a JSON object of texts"))
    }

    fn path(&self, at: usize) -> Result<PathBuf, ArgumentError> {
        let path = PathBuf::from(&self.all[at]);
        if path.is_absolute() { Ok(path) } else { Err(self.invalid(at, "an absolute path")) }
    }

    fn number(&self, at: usize) -> Result<u64, ArgumentError> {
        self.text(at)?.parse().map_err(|_| self.invalid(at, "a size in bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options::new(&[("a".to_owned(), "b".to_owned())].into(), "", false, "pv").unwrap()
    }

    #[test]
    fn arguments_have_the_kubelets_order_and_are_read_back() {
        let json = r#"{"a":"b","kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw"}"#;
        let (node, device) = ("n".to_owned(), "/dev/x".to_owned());
        let directory = PathBuf::from("/d");
        let rows = [
            (Call::Init, vec!["init"]),
            (Call::GetVolumeName { options: options() }, vec!["getvolumename", json]),
            (Call::Attach { options: options(), node: node.clone() }, vec!["attach", json, "n"]),
            (Call::Detach { volume: "pv".to_owned(), node: node.clone() }, vec!["detach", "pv", "n"]),
            (
                Call::WaitForAttach { device: String::new(), options: options() },
                vec!["waitforattach", "", json],
            ),
            (Call::IsAttached { options: options(), node }, vec!["isattached", json, "n"]),
            (
                Call::MountDevice {
                    directory: directory.clone(),
                    device: device.clone(),
                    options: options(),
                },
                vec!["mountdevice", "/d", "/dev/x", json],
            ),
            (Call::UnmountDevice { directory: directory.clone() }, vec!["unmountdevice", "/d"]),
            (Call::Mount { directory: directory.clone(), options: options() }, vec!["mount", "/d", json]),
            (Call::Unmount { directory: directory.clone() }, vec!["unmount", "/d"]),
            (
                Call::ExpandVolume {
                    options: options(),
                    directory: directory.clone(),
                    new_size: 2,
                    old_size: 1,
                },
                vec!["expandvolume", json, "/d", "2", "1"],
            ),
            (
                Call::ExpandFs { options: options(), device, directory, new_size: 2, old_size: 1 },
                vec!["expandfs", json, "/dev/x", "/d", "2", "1"],
            ),
        ];
        for (call, expected) in rows {
            let line = call.command_line();
            assert_eq!(line, expected);
            assert_eq!(Call::parse(&line).unwrap(), call);
        }
    }

    #[test]
    fn what_is_no_call_out_is_refused_by_name() {
        for (line, expected) in [
            (vec![], "call-out \"\" does not exist"),
            (vec!["Mount", "/d", "{}"], "call-out \"Mount\" does not exist"),
            (vec!["mount", "/d"], "call-out \"mount\" takes 2 arguments and got 1"),
            (vec!["mount", "d", "{}"], "argument 1 of call-out \"mount\" is not an absolute path"),
            (vec!["mount", "/d", "[]"], "argument 2 of call-out \"mount\" is not a JSON object of texts"),
            (
                vec!["expandfs", "{}", "", "/d", "1Gi", "1"],
                "argument 4 of call-out \"expandfs\" is not a size",
            ),
        ] {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let error = Call::parse(&line).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
