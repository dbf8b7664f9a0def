//! The documents that are exchanged with a program: docs/exec.md describes them, with this version.

use std::{collections::BTreeMap, path::PathBuf};

use berth_core::{Access, AccessMode, Capacity, CapacityRange, VolumeCapability};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{Context, Error, NodeVolume, Result, Secrets, Volume};

/// The version of the interface.
pub(super) const VERSION: u64 = 1;
/// What stands for the value of a secret in everything that is logged or answered.
const REDACTED: &str = "***";

macro_rules! operations {
    ($($name:ident = $text:literal,)*) => {
        /// What a program can be asked to do.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Operation { $($name,)* }

        impl Operation {
            pub(super) const ALL: &[Self] = &[$(Self::$name,)*];

            pub(super) fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

operations! {
    Describe = "describe",
    Probe = "probe",
    Create = "create",
    Clone = "clone",
    Restore = "restore",
    Delete = "delete",
    Snapshot = "snapshot",
    DeleteSnapshot = "delete-snapshot",
    Grow = "grow",
    Capacity = "capacity",
    Attach = "attach",
    Detach = "detach",
    Stage = "stage",
    Unstage = "unstage",
    Publish = "publish",
    Unpublish = "unpublish",
    NodeGrow = "node-grow",
    Stats = "stats",
}

/// What a program says of itself.
#[derive(Debug, Clone)]
pub(super) struct Described {
    pub(super) name: Option<String>,
    pub(super) block: bool,
    pub(super) multi_node: bool,
    pub(super) online_grow: bool,
    pub(super) max_volumes: Option<u32>,
    operations: Vec<Operation>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DescribeReply {
    version: u64,
    name: Option<String>,
    operations: Vec<String>,
    #[serde(default)]
    block: bool,
    #[serde(default)]
    multi_node: bool,
    #[serde(default = "yes")]
    online_grow: bool,
    max_volumes: Option<u32>,
}

fn yes() -> bool {
    true
}

impl Described {
    /// Reads the answer to `describe`, and refuses operations that cannot be had without others.
    pub(super) fn read(reply: Value) -> Result<Self> {
        use Operation::{
            Attach, Capacity, Clone, Create, Delete, DeleteSnapshot, Detach, Grow, NodeGrow, Publish,
            Restore, Snapshot, Stage, Unpublish, Unstage,
        };
        let reply: DescribeReply = read(Operation::Describe, reply)?;
        let wrong = |why: String| Error::Invalid(format!("describe: {why}"));
        if reply.version != VERSION {
            return Err(wrong(format!(
                "the program speaks version {} of the interface, and this is version {VERSION}",
                reply.version
            )));
        }
        let mut operations = Vec::new();
        for name in &reply.operations {
            let known = Operation::ALL.iter().find(|operation| operation.name() == name);
            operations.push(*known.ok_or_else(|| {
                let known: Vec<_> = Operation::ALL.iter().map(|known| known.name()).collect();
                wrong(format!("there is no operation {name:?}; there are {}", known.join(", ")))
            })?);
        }
        let described = Self {
            name: reply.name,
            block: reply.block,
            multi_node: reply.multi_node,
            online_grow: reply.online_grow,
            max_volumes: reply.max_volumes,
            operations,
        };
        for (operation, needed) in [
            (Create, Delete),
            (Delete, Create),
            (Clone, Create),
            (Restore, Snapshot),
            (Snapshot, DeleteSnapshot),
            (Snapshot, Restore),
            (DeleteSnapshot, Snapshot),
            (Snapshot, Create),
            (Grow, Create),
            (Capacity, Create),
            (Attach, Detach),
            (Attach, Create),
            (Detach, Attach),
            (Stage, Unstage),
            (Unstage, Stage),
            (Unpublish, Publish),
            (NodeGrow, Grow),
        ] {
            if described.has(operation) && !described.has(needed) {
                let (operation, needed) = (operation.name(), needed.name());
                return Err(wrong(format!(
                    "{operation:?} needs {needed:?}, which is not among the operations"
                )));
            }
        }
        if !described.has(Publish) && !described.has(Stage) {
            return Err(wrong("\"publish\" or \"stage\" is needed for a node to use volumes".to_owned()));
        }
        Ok(described)
    }

    pub(super) fn has(&self, operation: Operation) -> bool {
        self.operations.contains(&operation)
    }
}

/// The answer to `create`, `clone` and `restore`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Created {
    pub(super) capacity: Option<u64>,
    #[serde(default)]
    pub(super) context: BTreeMap<String, String>,
}

/// The answer to `grow`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Grown {
    pub(super) capacity: Option<u64>,
    pub(super) node_grow: Option<bool>,
}

/// The answer to `snapshot`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Taken {
    pub(super) size: Option<u64>,
}

/// The answer to `attach`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttachReply {
    #[serde(default)]
    pub(super) context: BTreeMap<String, String>,
}

/// The answer to `stage`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StageReply {
    pub(super) device: Option<PathBuf>,
}

/// The answer to `publish`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PublishReply {
    pub(super) source: Option<PathBuf>,
    pub(super) device: Option<PathBuf>,
}

/// The answer to `capacity`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CapacityReply {
    pub(super) available: u64,
    pub(super) largest: Option<u64>,
    pub(super) smallest: Option<u64>,
}

/// The answer to `stats`; without sizes, the filesystem itself is asked.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StatsReply {
    pub(super) total: Option<u64>,
    pub(super) used: Option<u64>,
    pub(super) available: Option<u64>,
}

/// An answer without fields.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Done {}

/// Reads an answer; a field that is not known is a mistake of the program, and named.
pub(super) fn read<T: DeserializeOwned>(operation: Operation, reply: Value) -> Result<T> {
    serde_json::from_value(reply)
        .map_err(|error| Error::Unavailable(format!("{}: the program's answer: {error}", operation.name())))
}

/// The fields of a request, without its secrets.
#[derive(Debug, Clone, Default)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    /// The sizes that the caller accepts, and the one to choose if nothing speaks against it.
    pub(super) fn with_range(self, range: &CapacityRange, chosen: Capacity) -> Self {
        self.with("requiredBytes", range.required().map_or(0, Capacity::bytes))
            .with("limitBytes", range.limit().map_or(0, Capacity::bytes))
            .with("capacity", chosen.bytes())
    }

    /// What is known of a volume that exists.
    pub(super) fn with_volume(self, volume: &Volume) -> Self {
        let Value::Object(fields) = volume_document(volume) else { return self };
        Self(self.0.into_iter().chain(fields).collect())
    }

    pub(super) fn with_capability(self, capability: &VolumeCapability) -> Self {
        let fields = self
            .with("access", capability.access.kind().to_string())
            .with("accessMode", mode_name(capability.mode));
        match &capability.access {
            Access::Mount { fs_type, flags, .. } => {
                fields.with("fsType", fs_type.as_str()).with("mountFlags", flags.clone())
            }
            Access::Block => fields,
        }
    }

    pub(super) fn with_node_volume(self, volume: &NodeVolume) -> Self {
        self.with("id", volume.id.as_str())
            .with("context", map(&volume.context))
            .with("publishContext", map(&volume.publish_context))
            .with("readOnly", volume.read_only)
            .with_capability(&volume.capability)
    }

    /// The whole request document of an operation, as JSON.
    pub(super) fn document(&self, operation: Operation, ctx: &Context) -> Vec<u8> {
        let mut document = self.0.clone();
        document.insert("version".to_owned(), VERSION.into());
        document.insert("operation".to_owned(), operation.name().into());
        let secrets: Map<String, Value> =
            ctx.secrets().iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        document.insert("secrets".to_owned(), secrets.into());
        if let Some(claim) = ctx.claim() {
            let claim = json!({"name": claim.name, "namespace": claim.namespace, "volume": claim.volume});
            document.insert("claim".to_owned(), claim);
        }
        if let Some(pod) = ctx.pod() {
            let pod = json!({
                "name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "serviceAccount": pod.service_account,
            });
            document.insert("pod".to_owned(), pod);
        }
        serde_json::to_vec(&document).expect("a document always becomes JSON")
    }

    /// The fields as variables of an environment, for programs that do not read JSON. Secrets are not among them.
    pub(super) fn environment(&self, operation: Operation) -> Vec<(String, String)> {
        let mut variables = vec![
            ("BERTH_OPERATION".to_owned(), operation.name().to_owned()),
            ("BERTH_VERSION".to_owned(), VERSION.to_string()),
        ];
        add_variables("BERTH", &self.0, &mut variables);
        variables
    }
}

fn add_variables(prefix: &str, fields: &Map<String, Value>, variables: &mut Vec<(String, String)>) {
    for (key, value) in fields {
        let name = format!("{prefix}_{}", variable_name(key));
        match value {
            Value::Object(fields) => add_variables(&name, fields, variables),
            // What no variable can hold is in the document.
            Value::String(text) if !text.contains('\0') => variables.push((name, text.clone())),
            Value::Bool(_) | Value::Number(_) => variables.push((name, value.to_string())),
            _ => {}
        }
    }
}

/// `requiredBytes` is REQUIRED_BYTES, and what no variable's name may have is an underscore.
fn variable_name(key: &str) -> String {
    let mut name = String::new();
    for character in key.chars() {
        if character.is_ascii_uppercase() && name.ends_with(|last: char| last.is_ascii_lowercase()) {
            name.push('_');
        }
        name.push(if character.is_ascii_alphanumeric() { character } else { '_' });
    }
    name.to_ascii_uppercase()
}

/// A volume that exists, as a document.
pub(super) fn volume_document(volume: &Volume) -> Value {
    json!({
        "id": volume.id.as_str(),
        "capacity": volume.capacity.bytes(),
        "access": volume.access.map(|access| access.to_string()),
        "parameters": map(&volume.parameters),
        "context": map(&volume.context),
    })
}

/// Pairs of text as a JSON object.
pub(super) fn map(pairs: &BTreeMap<String, String>) -> Value {
    pairs.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect::<Map<_, _>>().into()
}

/// The name of an access mode in the protocol of CSI.
fn mode_name(mode: AccessMode) -> &'static str {
    match mode {
        AccessMode::SingleNodeWriter => "SINGLE_NODE_WRITER",
        AccessMode::SingleNodeReaderOnly => "SINGLE_NODE_READER_ONLY",
        AccessMode::MultiNodeReaderOnly => "MULTI_NODE_READER_ONLY",
        AccessMode::MultiNodeSingleWriter => "MULTI_NODE_SINGLE_WRITER",
        AccessMode::MultiNodeMultiWriter => "MULTI_NODE_MULTI_WRITER",
        AccessMode::SingleNodeSingleWriter => "SINGLE_NODE_SINGLE_WRITER",
        AccessMode::SingleNodeMultiWriter => "SINGLE_NODE_MULTI_WRITER",
    }
}

/// The error that a program answered, if its answer is one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Failure {
    code: String,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct MaybeFailure {
    error: Option<Failure>,
}

/// What the answer of a program means: fields, or the error that it names. `what` is the thing that NOT_FOUND is about.
pub(super) fn judge(operation: Operation, reply: Value, what: (&'static str, &str)) -> Result<Value> {
    let is_error = reply.get("error").is_some();
    if !is_error {
        return if reply.is_object() {
            Ok(reply)
        } else {
            let name = operation.name();
            Err(Error::Unavailable(format!("{name}: the program answered JSON that is not an object")))
        };
    }
    let failure: MaybeFailure = read(operation, reply)?;
    let Some(Failure { code, message }) = failure.error else { return Ok(json!({})) };
    let said = match message.as_str() {
        "" => format!("{}: the program answered {code}", operation.name()),
        message => format!("{}: {message}", operation.name()),
    };
    Err(match code.as_str() {
        "INVALID_ARGUMENT" => Error::Invalid(said),
        "NOT_FOUND" => Error::not_found(what.0, what.1),
        "ALREADY_EXISTS" => Error::Conflict(said),
        "FAILED_PRECONDITION" => Error::Precondition(said),
        "OUT_OF_RANGE" => Error::OutOfRange(said),
        "RESOURCE_EXHAUSTED" => Error::Exhausted(said),
        "ABORTED" => Error::Busy(said),
        "PERMISSION_DENIED" | "UNAUTHENTICATED" => Error::Denied(said),
        "INTERNAL" => Error::State(said),
        "UNAVAILABLE" => Error::Unavailable(said),
        other => {
            Error::Unavailable(format!("{said} (with a code that the interface does not have: {other:?})"))
        }
    })
}

/// A text of the program without the values of the call's secrets.
pub(super) fn redact(text: &str, secrets: &Secrets) -> String {
    let mut values: Vec<&str> =
        secrets.iter().map(|(_, value)| value).filter(|value| !value.is_empty()).collect();
    // A secret may be the beginning of another.
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    values.into_iter().fold(text.to_owned(), |text, value| text.replace(value, REDACTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(operations: &[&str]) -> Result<Described> {
        Described::read(json!({"version": 1, "operations": operations}))
    }

    #[test]
    fn a_description_that_contradicts_itself_is_refused_by_name() {
        assert!(describe(&["create", "delete", "publish"]).unwrap().has(Operation::Create));
        for (operations, why) in [
            (&["create", "publish"][..], "\"create\" needs \"delete\""),
            (&["create", "delete"], "\"publish\" or \"stage\""),
            (&["publish", "snapshots"], "no operation \"snapshots\"; there are describe, probe"),
            (&["stage"], "\"stage\" needs \"unstage\""),
            (&["publish", "node-grow"], "\"node-grow\" needs \"grow\""),
        ] {
            let error = describe(operations).unwrap_err().to_string();
            assert!(error.contains(why), "{operations:?}: {error}");
        }
        for (reply, why) in [
            (json!({"version": 2, "operations": ["publish"]}), "version 2"),
            (json!({"version": 1, "operations": ["publish"], "blocks": true}), "blocks"),
            (json!({"version": 1}), "operations"),
        ] {
            let error = Described::read(reply).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn variables_have_every_field_but_secrets() {
        let secrets: BTreeMap<String, String> = [("password".to_owned(), "hush".to_owned())].into();
        let ctx = Context::new(None, secrets.into(), &BTreeMap::new());
        let pairs: BTreeMap<String, String> = [("sub-dir".to_owned(), "a b".to_owned())].into();
        let fields = Fields::default()
            .with("id", "v-1")
            .with("readOnly", true)
            .with("requiredBytes", 7)
            .with("parameters", map(&pairs))
            .with("mountFlags", vec!["ro".to_owned()]);
        let variables: BTreeMap<String, String> = fields.environment(Operation::Create).into_iter().collect();
        let names: Vec<&str> = variables.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "BERTH_ID",
                "BERTH_OPERATION",
                "BERTH_PARAMETERS_SUB_DIR",
                "BERTH_READ_ONLY",
                "BERTH_REQUIRED_BYTES",
                "BERTH_VERSION"
            ]
        );
        assert_eq!((&*variables["BERTH_ID"], &*variables["BERTH_READ_ONLY"]), ("v-1", "true"));
        let document: Value = serde_json::from_slice(&fields.document(Operation::Create, &ctx)).unwrap();
        assert_eq!(document["secrets"]["password"], "hush");
        assert_eq!(document["operation"], "create");
        assert_eq!(redact("it said hush twice: hush", ctx.secrets()), "it said *** twice: ***");
    }

    #[test]
    fn errors_of_programs_have_the_codes_that_they_name() {
        let judged = |reply| judge(Operation::Attach, reply, ("node", "n"));
        let error = |code: &str| json!({"error": {"code": code, "message": "why"}});
        assert!(matches!(judged(error("NOT_FOUND")), Err(Error::NotFound { what: "node", .. })));
        assert!(
            matches!(judged(error("RESOURCE_EXHAUSTED")), Err(Error::Exhausted(said)) if said == "attach: why")
        );
        assert!(matches!(judged(error("ODD")), Err(Error::Unavailable(said)) if said.contains("ODD")));
        assert!(matches!(judged(json!([1])), Err(Error::Unavailable(_))));
        assert!(judged(json!({"error": null})).is_ok());
        assert!(judged(json!({})).is_ok());
    }
}
