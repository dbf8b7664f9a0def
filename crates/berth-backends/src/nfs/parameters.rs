//! What classes, contexts and secrets say about NFS volumes, in csi-driver-nfs's words.

use std::collections::BTreeMap;

use berth_core::{
    AccessKind, AccessMode, ClaimField, Name, VolumeCapability, names::KUBERNETES_PARAMETER_PREFIX,
};
use berth_nfs::Options;
use serde::{Deserialize, Serialize};

use super::{
    id::{OnDelete, ShareName, SubPath, VolumeRef, check_name},
    node::mount::needs_kernel,
};
use crate::{Context, Error, Parameters, Result, Volume, image};

const SERVER: &str = "server";
const SHARE: &str = "share";
const SUB_DIR: &str = "subdir";
const MOUNT_OPTIONS: &str = "mountoptions";
const MOUNT_PERMISSIONS: &str = "mountpermissions";
const KIND: &str = "kind";
const UID: &str = "uid";
const GID: &str = "gid";
const SHARED: &str = "shared";
/// The name of the secret with mount options.
const MOUNT_OPTIONS_SECRET: &str = "mountOptions";

/// What Kubernetes says about the claim, below [`KUBERNETES_PARAMETER_PREFIX`].
const CLAIM_NAME: &str = "pvc/name";
const CLAIM_NAMESPACE: &str = "pvc/namespace";
const VOLUME_NAME: &str = "pv/name";

/// What a volume is on its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum VolumeKind {
    /// A directory, as csi-driver-nfs has them: its size is reported and not enforced.
    #[default]
    Directory,
    /// A file in a directory, with a filesystem in it: its size is enforced, and one node writes it at a time.
    Image,
}

impl VolumeKind {
    fn parse(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "" | "directory" => Ok(Self::Directory),
            "image" => Ok(Self::Image),
            _ => Err(Error::Invalid(format!("kind {text:?} is none of directory, image"))),
        }
    }

    /// The kind of a volume that was made with these parameters; what makes no sense is a directory.
    pub(super) fn of(parameters: &Parameters) -> Self {
        let found = parameters.iter().find(|(key, _)| key.eq_ignore_ascii_case(KIND));
        found.and_then(|(_, value)| Self::parse(value).ok()).unwrap_or_default()
    }

    /// Refuses to make a volume of this kind out of another.
    pub(super) fn check_source(self, source: Self) -> Result<()> {
        match (self, source) {
            (Self::Directory, Self::Image) => Err(Error::Invalid(
                "the source is an image: a volume made of it needs a class with kind: image".to_owned(),
            )),
            (Self::Image, Self::Directory) => Err(Error::Invalid(
                "the source is a directory: a volume made of it cannot be of kind image".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a use that no volume of this kind can be put to.
    pub(super) fn check(self, capabilities: &[VolumeCapability]) -> Result<()> {
        let refuse = |why: &str| Err(Error::Invalid(why.to_owned()));
        if capabilities.iter().any(|capability| capability.access.kind() == AccessKind::Block) {
            return match self {
                Self::Directory => refuse("NFS volumes are directories: block access cannot be had"),
                Self::Image => refuse("kind image is for filesystems: block access cannot be had on NFS"),
            };
        }
        if self == Self::Directory {
            return Ok(());
        }
        let shared =
            |mode| matches!(mode, AccessMode::MultiNodeMultiWriter | AccessMode::MultiNodeSingleWriter);
        if capabilities.iter().any(|capability| shared(capability.mode)) {
            return refuse(
                "kind image cannot be used by several nodes while one writes (ReadWriteMany): its filesystem belongs to \
                 one node at a time; take ReadWriteOnce, or kind directory",
            );
        }
        image::filesystem_asked(capabilities).map(|_| ())
    }
}

/// A StorageClass's parameters, read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Class {
    server: String,
    share: String,
    sub_dir: String,
    on_delete: String,
    /// What its volumes are.
    pub(super) kind: VolumeKind,
    /// Whether its volumes may use a directory that another volume uses.
    pub(super) shared: bool,
    /// Owner and mode of the directory.
    pub(super) ownership: OwnerAndMode,
    /// How the share is reached.
    pub(super) mount_options: Vec<String>,
}

/// Owner and mode of a volume's directory; what is `None` is left as it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct OwnerAndMode {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

/// Where a volume is, as a PersistentVolume's or a pod's attributes say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShareSubdirectory {
    pub(super) share: ShareName,
    /// The share itself if `None`.
    pub(super) dir: Option<SubPath>,
    pub(super) mount_options: Vec<String>,
    pub(super) kind: VolumeKind,
    pub(super) ownership: OwnerAndMode,
}

impl Class {
    /// Reads parameters; names the first that is unknown or wrong.
    pub(super) fn parse(parameters: &Parameters) -> Result<Self> {
        let mut class = Self::default();
        for (key, value) in parameters {
            match key.to_ascii_lowercase().as_str() {
                SERVER => class.server.clone_from(value),
                SHARE => class.share.clone_from(value),
                SUB_DIR => class.sub_dir.clone_from(value),
                "ondelete" => {
                    OnDelete::parse(value)?;
                    class.on_delete.clone_from(value);
                }
                MOUNT_PERMISSIONS => class.ownership.mode = parse_mode(value)?,
                UID => class.ownership.uid = parse_id(key, value)?,
                GID => class.ownership.gid = parse_id(key, value)?,
                KIND => class.kind = VolumeKind::parse(value)?,
                SHARED => class.shared = parse_bool(key, value)?,
                MOUNT_OPTIONS => class.mount_options = options_in(value),
                known if known.starts_with(KUBERNETES_PARAMETER_PREFIX) => {}
                _ => {
                    return Err(Error::Invalid(format!(
                        "parameter {key:?} is none of server, share, subDir, onDelete, kind, shared, \
                         mountPermissions, mountOptions, uid, gid"
                    )));
                }
            }
        }
        Ok(class)
    }

    /// The share it means, if it names a server.
    pub(super) fn share(&self) -> Result<Option<ShareName>> {
        if self.server.is_empty() {
            return Ok(None);
        }
        ShareName::new(&self.server, &self.share).map(Some)
    }

    /// The volume of that name.
    pub(super) fn volume(
        &self,
        name: &Name,
        parameters: &Parameters,
        default: Option<OnDelete>,
    ) -> Result<VolumeRef> {
        check_name("the volume's name", name.as_str())?;
        let share = ShareName::new(&self.server, &self.share)?;
        let on_delete = match default {
            Some(OnDelete::Retain) if self.on_delete.is_empty() => "retain",
            Some(OnDelete::Archive) if self.on_delete.is_empty() => "archive",
            _ => &self.on_delete,
        };
        let (dir, uuid) = if self.sub_dir.trim_matches('/').is_empty() {
            (SubPath::new("the volume's name", name.as_str())?, String::new())
        } else {
            let text = expand(&self.sub_dir, name.as_str(), parameters)?;
            (SubPath::new("subDir", &text)?, name.to_string())
        };
        Ok(VolumeRef { share, dir, uuid, on_delete: on_delete.to_owned() })
    }

    /// What the node gets about the volume: all parameters, and the directory that came of them.
    pub(super) fn context(parameters: &Parameters, volume: &VolumeRef) -> BTreeMap<String, String> {
        let mut context = parameters.clone();
        context.retain(|key, _| !ClaimField::is_parameter(key));
        let key = context.keys().find(|key| key.eq_ignore_ascii_case(SUB_DIR)).cloned();
        context.insert(key.unwrap_or_else(|| SUB_DIR.to_owned()), volume.dir.to_string());
        context
    }
}

/// What the node gets about a volume of which only the id is known.
pub(super) fn context_of(volume: &VolumeRef) -> BTreeMap<String, String> {
    BTreeMap::from([
        (SERVER.to_owned(), volume.share.server.clone()),
        (SHARE.to_owned(), volume.share.path()),
        (SUB_DIR.to_owned(), volume.dir.to_string()),
    ])
}

/// Whether a pair is so, by what a volume is known to have. Of one that somebody else made no more is known than where
/// it is, so that nothing else can be said against it.
pub(super) fn agrees(volume: &Volume, known: &Parameters, (key, value): (&str, &str)) -> bool {
    let place = [SERVER, SHARE, SUB_DIR].iter().any(|name| key.eq_ignore_ascii_case(name));
    match known.iter().chain(&volume.context).find(|(name, _)| name.eq_ignore_ascii_case(key)) {
        Some((_, known)) if place => known.trim_matches('/') == value.trim_matches('/'),
        Some((_, known)) => known == value,
        None => volume.parameters.is_empty(),
    }
}

/// The share that a snapshot class wants snapshots on, where it names one, and how it is reached.
pub(super) fn snapshot_share(
    parameters: &Parameters,
    source: &ShareName,
) -> Result<(ShareName, Vec<String>)> {
    let (mut server, mut share, mut options) = (source.server.as_str(), source.share.as_str(), Vec::new());
    for (key, value) in parameters {
        match key.to_ascii_lowercase().as_str() {
            SERVER => server = value,
            SHARE => share = value,
            MOUNT_OPTIONS => options = options_in(value),
            known if known.starts_with(KUBERNETES_PARAMETER_PREFIX) => {}
            _ => {
                return Err(Error::Invalid(format!(
                    "parameter {key:?} of the snapshot class is none of server, share, mountOptions"
                )));
            }
        }
    }
    Ok((ShareName::new(server, share)?, options))
}

impl ShareSubdirectory {
    /// Reads a volume's context; what it does not say, the id may.
    pub(super) fn parse(id: &str, context: &BTreeMap<String, String>) -> Result<Self> {
        let get = |name: &str| {
            let found = context.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
        };
        let mount_options = get(MOUNT_OPTIONS).map(options_in).unwrap_or_default();
        let id_of = |key| get(key).map(|value| parse_id(key, value)).transpose().map(Option::flatten);
        let ownership = OwnerAndMode {
            mode: get(MOUNT_PERMISSIONS).map(parse_mode).transpose()?.flatten(),
            uid: id_of(UID)?,
            gid: id_of(GID)?,
        };
        let kind = get(KIND).map(VolumeKind::parse).transpose()?.unwrap_or_default();
        let Some(server) = get(SERVER) else {
            let volume = VolumeRef::parse(id).map_err(|_| {
                Error::Invalid(
                    "volume_context: server is missing: give the name of the NFS server".to_owned(),
                )
            })?;
            return Ok(Self { share: volume.share, dir: Some(volume.dir), mount_options, kind, ownership });
        };
        let share = get(SHARE).ok_or_else(|| {
            Error::Invalid("volume_context: share is missing: give the exported directory".to_owned())
        })?;
        let dir = match get(SUB_DIR) {
            None => None,
            Some(text) => {
                let name = get(&kubernetes_key(VOLUME_NAME)).unwrap_or_default();
                Some(SubPath::new("volume_context: subDir", &expand(text, name, context)?)?)
            }
        };
        Ok(Self { share: ShareName::new(server, share)?, dir, mount_options, kind, ownership })
    }
}

/// The mount options in a call's secret.
pub(super) fn secret_options(ctx: &Context) -> Vec<String> {
    ctx.secrets().get(MOUNT_OPTIONS_SECRET).map(options_in).unwrap_or_default()
}

/// Mount options as a class or secret has them, commas between; whoever reads them splits them.
pub(super) fn options_in(text: &str) -> Vec<String> {
    if text.trim().is_empty() { Vec::new() } else { vec![text.to_owned()] }
}

/// Refuses options out of a secret that nobody can use, without a word of what they are.
pub(super) fn check_secret_options(options: &[String]) -> Result<()> {
    let options = options.iter().flat_map(|text| text.split(',')).map(str::trim);
    let options = options.filter(|option| !needs_kernel(option));
    Options::parse(options).map(drop).map_err(|_| {
        Error::Invalid("mountOptions in the secret: one of them is no mount option of NFS".to_owned())
    })
}

/// Octal, as chmod takes it; 0 and nothing leave the mode alone.
pub(super) fn parse_mode(text: &str) -> Result<Option<u32>> {
    if text.is_empty() {
        return Ok(None);
    }
    match u32::from_str_radix(text, 8) {
        Ok(0) => Ok(None),
        Ok(mode) if mode <= 0o7777 && !text.starts_with('+') => Ok(Some(mode)),
        _ => Err(Error::Invalid(format!("mountPermissions {text:?} is not an octal mode such as 0777"))),
    }
}

fn parse_id(key: &str, text: &str) -> Result<Option<u32>> {
    if text.is_empty() {
        return Ok(None);
    }
    // The last one means "no change" to the kernel, and "nobody" to nobody.
    match text.parse::<u32>() {
        Ok(id) if id != u32::MAX && !text.starts_with('+') => Ok(Some(id)),
        _ => Err(Error::Invalid(format!("{key} {text:?} is not a number"))),
    }
}

fn parse_bool(key: &str, text: &str) -> Result<bool> {
    match text {
        "true" => Ok(true),
        "false" | "" => Ok(false),
        _ => Err(Error::Invalid(format!("{key} {text:?} is neither \"true\" nor \"false\""))),
    }
}

/// Replaces `${…}` by what Kubernetes says of the claim.
fn expand(template: &str, volume: &str, parameters: &Parameters) -> Result<String> {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("${") {
        let (variable, after) = after.split_once('}').ok_or_else(|| {
            Error::Invalid(format!("subDir {template:?} opens a \"${{\" that it does not close"))
        })?;
        text.push_str(before);
        text.push_str(&value_of(variable.trim(), volume, parameters)?);
        rest = after;
    }
    Ok(text + rest)
}

fn kubernetes_key(name: &str) -> String {
    format!("{KUBERNETES_PARAMETER_PREFIX}{name}")
}

fn value_of(variable: &str, volume: &str, parameters: &Parameters) -> Result<String> {
    let (key, fallback) = match variable {
        "pvc.metadata.name" => (kubernetes_key(CLAIM_NAME), None),
        "pvc.metadata.namespace" => (kubernetes_key(CLAIM_NAMESPACE), None),
        // The provisioner calls the volume what Kubernetes will call it.
        "pv.metadata.name" => (kubernetes_key(VOLUME_NAME), Some(volume)),
        _ => {
            let field = ClaimField::parse(variable).ok_or_else(|| {
                Error::Invalid(format!(
                    "subDir: ${{{variable}}} is none of ${{pvc.metadata.name}}, ${{pvc.metadata.namespace}}, \
                     ${{pv.metadata.name}}, ${{pvc.metadata.labels['KEY']}}, ${{pvc.metadata.annotations['KEY']}}"
                ))
            })?;
            (field.parameter(), None)
        }
    };
    let value = parameters.get(&key).map(String::as_str).or(fallback).unwrap_or_default();
    if value.is_empty() {
        return Err(Error::Invalid(format!(
            "subDir needs ${{{variable}}}, but the call does not say it: the claim has to have it, and the provisioner \
             to run with --extra-create-metadata"
        )));
    }
    // Whoever may write a claim chooses its labels and annotations: a value must not lead to another claim's directory.
    let refuse = |why: &str| {
        Err(Error::Invalid(format!(
            "subDir: the value {value:?} of ${{{variable}}} {why}: it has to be the name of one directory"
        )))
    };
    if value.contains(['/', '\\']) {
        return refuse("holds a slash");
    }
    if value.contains(char::is_control) {
        return refuse("holds a control character");
    }
    if value.trim().is_empty() || value == "." || value == ".." {
        return refuse("names no directory");
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> Parameters {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    fn made(pairs: &[(&str, &str)]) -> Result<VolumeRef> {
        let parameters = map(pairs);
        Class::parse(&parameters)?.volume(&"pvc-1".parse().unwrap(), &parameters, None)
    }

    fn refused(pairs: &[(&str, &str)]) -> String {
        match made(pairs) {
            Err(Error::Invalid(sentence)) => sentence,
            other => panic!("{pairs:?}: {other:?}"),
        }
    }

    #[test]
    fn a_volume_is_where_its_class_says_whatever_the_case_of_the_keys() {
        for (pairs, id) in [
            (&[("server", "nfs.svc"), ("share", "/export/")][..], "nfs.svc#export#pvc-1##"),
            (&[("SERVER", "nfs.svc"), ("Share", "/")], "nfs.svc##pvc-1##"),
            (&[("server", "nfs"), ("share", "/e"), ("subdir", "/a/b/")], "nfs#e#a/b#pvc-1#"),
            (&[("server", "nfs"), ("share", "/e"), ("onDelete", "Retain")], "nfs#e#pvc-1##Retain"),
            (&[("server", "nfs"), ("share", "/e"), ("ondelete", "delete")], "nfs#e#pvc-1##"),
        ] {
            assert_eq!(made(pairs).unwrap().to_string(), id, "{pairs:?}");
        }
        let parameters = map(&[("server", "nfs"), ("share", "/e")]);
        let class = Class::parse(&parameters).unwrap();
        let name = "pvc-1".parse().unwrap();
        let archived = class.volume(&name, &parameters, Some(OnDelete::Archive)).unwrap();
        assert_eq!(archived.to_string(), "nfs#e#pvc-1##archive");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |key: &'static str, value: &'static str| {
            refused(&[("server", "nfs"), ("share", "/e"), (key, value)])
        };
        assert!(with("sevrer", "x").contains("\"sevrer\""));
        assert!(with("kind", "btrfs").contains("none of directory, image"));
        assert!(with("onDelete", "shred").contains("shred"));
        assert!(with("mountPermissions", "0999").contains("0999"));
        assert!(with("mountPermissions", "77777").contains("77777"));
        assert!(with("uid", "root").contains("root"));
        assert!(with("gid", "4294967295").contains("gid"));
        assert!(with("subDir", "../x").contains(".."));
        assert!(with("subDir", ".berth/volumes").contains(".berth"));
        assert!(with("subDir", "a#b").contains('#'));
        assert!(refused(&[("share", "/e")]).contains("server is missing"));
        assert!(refused(&[("server", "n s"), ("share", "/e")]).contains("n s"));
    }

    fn used(mode: AccessMode, access: berth_core::Access) -> VolumeCapability {
        VolumeCapability { access, mode }
    }

    #[test]
    fn an_image_is_for_one_writing_node_and_a_directory_for_all() {
        let mounted = |fs_type: &str| berth_core::Access::Mount {
            fs_type: fs_type.to_owned(),
            flags: vec![],
            group: None,
        };
        for mode in AccessMode::ALL {
            let shared = matches!(mode, AccessMode::MultiNodeMultiWriter | AccessMode::MultiNodeSingleWriter);
            let checked = VolumeKind::Image.check(&[used(mode, mounted(""))]);
            assert_eq!(checked.is_err(), shared, "{mode:?}: {checked:?}");
            assert!(VolumeKind::Directory.check(&[used(mode, mounted("ntfs"))]).is_ok(), "{mode:?}");
        }
        let once = AccessMode::SingleNodeWriter;
        for fs_type in ["", "ext4", "xfs", "btrfs"] {
            assert!(VolumeKind::Image.check(&[used(once, mounted(fs_type))]).is_ok(), "{fs_type}");
        }
        for (uses, word) in [
            (vec![used(once, mounted("ntfs"))], "ntfs"),
            (vec![used(once, mounted("ext4")), used(once, mounted("xfs"))], "two different"),
            (vec![used(once, berth_core::Access::Block)], "block"),
            (vec![used(once, mounted("")), used(AccessMode::MultiNodeMultiWriter, mounted(""))], "one node"),
        ] {
            let Err(Error::Invalid(sentence)) = VolumeKind::Image.check(&uses) else { panic!("{uses:?}") };
            assert!(sentence.contains(word), "{sentence}");
        }
        assert!(VolumeKind::Directory.check(&[used(once, berth_core::Access::Block)]).is_err());
    }

    #[test]
    fn a_template_takes_the_values_of_kubernetes() {
        let known = [
            ("server", "nfs"),
            ("share", "/e"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
            ("csi.storage.k8s.io/pvc/labels/app.kubernetes.io/name", "web"),
            ("csi.storage.k8s.io/pvc/annotations/dir", "x.y"),
        ];
        let dir = |template: &'static str| {
            let mut pairs = known.to_vec();
            pairs.push(("subDir", template));
            made(&pairs).map(|volume| volume.dir.to_string())
        };
        for (template, expected) in [
            ("${pvc.metadata.namespace}/${pvc.metadata.name}", "team/data"),
            ("${pv.metadata.name}", "pvc-1"),
            ("a-${pvc.metadata.labels['app.kubernetes.io/name']}-b", "a-web-b"),
            ("${pvc.metadata.annotations[\"dir\"]}", "x.y"),
            ("plain$dir", "plain$dir"),
        ] {
            assert_eq!(dir(template).unwrap(), expected, "{template}");
        }
        for (template, word) in [
            ("${pvc.metadata.labels['missing']}", "missing"),
            ("${pvc.metadata.uid}", "pvc.metadata.uid"),
            ("${pvc.metadata.labels[x]}", "labels[x]"),
            ("x${pvc.metadata.name", "does not close"),
        ] {
            let Err(Error::Invalid(sentence)) = dir(template) else { panic!("{template}") };
            assert!(sentence.contains(word), "{template}: {sentence}");
        }
    }

    #[test]
    fn a_value_from_a_claim_is_one_path_component() {
        for field in ["annotations", "labels"] {
            let key = format!("csi.storage.k8s.io/pvc/{field}/team");
            let template = format!("${{pvc.metadata.{field}['team']}}");
            for value in
                ["victim/data", "/victim", "victim/", "a\\b", ".", "..", " ", "", "a\nb", "a\u{7f}", "../x"]
            {
                for template in [template.clone(), format!("teams/{template}"), format!("x-{template}-y")] {
                    let pairs = [
                        ("server", "nfs"),
                        ("share", "/e"),
                        ("subDir", template.as_str()),
                        (key.as_str(), value),
                    ];
                    let sentence = refused(&pairs);
                    assert!(sentence.contains(&format!("{field}['team']")), "{value:?}: {sentence}");
                    let context = map(&pairs);
                    assert!(ShareSubdirectory::parse("x", &context).is_err(), "{value:?}");
                }
            }
            for value in ["victim", "...", "a.b", "größe"] {
                let pairs = [
                    ("server", "nfs"),
                    ("share", "/e"),
                    ("subDir", template.as_str()),
                    (key.as_str(), value),
                ];
                assert_eq!(made(&pairs).unwrap().dir.as_str(), value);
            }
        }
    }

    #[test]
    fn shared_is_true_or_false() {
        let with = |value| Class::parse(&map(&[("Shared", value)])).map(|class| class.shared);
        assert_eq!((with("true").unwrap(), with("false").unwrap(), with("").unwrap()), (true, false, false));
        let Err(Error::Invalid(sentence)) = with("yes") else { panic!("it is refused") };
        assert!(sentence.contains("Shared"), "{sentence}");
    }

    #[test]
    fn the_context_is_the_parameters_and_the_directory_that_came_of_them() {
        let parameters = map(&[
            ("server", "nfs"),
            ("share", "/e"),
            ("subDir", "${pvc.metadata.name}"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/labels/a", "b"),
        ]);
        let volume =
            Class::parse(&parameters).unwrap().volume(&"pvc-1".parse().unwrap(), &parameters, None).unwrap();
        let context = Class::context(&parameters, &volume);
        assert_eq!(
            context,
            map(&[
                ("server", "nfs"),
                ("share", "/e"),
                ("subDir", "data"),
                ("csi.storage.k8s.io/pvc/name", "data")
            ])
        );
        let place = ShareSubdirectory::parse("anything", &context).unwrap();
        assert_eq!((place.share, place.dir), (volume.share, Some(volume.dir)));
    }

    #[test]
    fn a_place_is_in_the_context_or_in_the_id() {
        let place = |id: &str, pairs: &[(&str, &str)]| ShareSubdirectory::parse(id, &map(pairs));
        let whole = place("static", &[("server", "nfs"), ("share", "/")]).unwrap();
        assert_eq!((whole.share.path().as_str(), whole.dir), ("/", None));
        let listed =
            place("nfs#e#pvc-1##", &[("mountPermissions", "0770"), ("mountOptions", "vers=3")]).unwrap();
        assert_eq!((listed.dir.unwrap().as_str(), listed.ownership.mode), ("pvc-1", Some(0o770)));
        assert_eq!(listed.mount_options, ["vers=3"]);
        for (id, pairs, word) in [
            ("static", &[][..], "server is missing"),
            ("static", &[("server", "nfs")], "share is missing"),
            ("static", &[("server", "nfs"), ("share", "/a/../..")], ".."),
            ("static", &[("server", "nfs"), ("share", "/"), ("subDir", "a/../../etc")], ".."),
        ] {
            let Err(Error::Invalid(sentence)) = place(id, pairs) else { panic!("{pairs:?}") };
            assert!(sentence.contains(word), "{sentence}");
        }
    }

    #[test]
    fn nothing_is_held_against_a_volume_but_what_is_known_of_it() {
        let reference = VolumeRef::parse("nfs#e#team/app#pvc-1#").unwrap();
        let known = |parameters: &[(&str, &str)]| {
            let mut volume =
                Volume::new("nfs#e#team/app#pvc-1#".parse().unwrap(), berth_core::Capacity::ZERO);
            volume.context = context_of(&reference);
            volume.parameters = std::sync::Arc::new(map(parameters));
            volume
        };
        let agree = |volume: &Volume, pair| agrees(volume, &volume.context, pair);
        let adopted = known(&[]);
        for pair in
            [("server", "nfs"), ("Share", "/e/"), ("subDir", "/team/app"), ("mountPermissions", "0777")]
        {
            assert!(agree(&adopted, pair), "{pair:?}");
        }
        for pair in [("server", "other"), ("share", "/"), ("subdir", "team/other")] {
            assert!(!agree(&adopted, pair), "{pair:?}");
        }
        assert!(!agree(&known(&[("server", "nfs")]), ("mountPermissions", "0777")));
    }

    #[test]
    fn snapshots_go_to_the_share_of_their_class_or_of_their_volume() {
        let source = ShareName::new("nfs", "e").unwrap();
        let of = |pairs: &[(&str, &str)]| snapshot_share(&map(pairs), &source);
        assert_eq!(of(&[("csi.storage.k8s.io/volumesnapshot/name", "x")]).unwrap().0, source);
        let (share, options) = of(&[("Server", "b"), ("share", "/s"), ("mountOptions", "vers=4.1")]).unwrap();
        assert_eq!((share.to_string().as_str(), options.len()), ("b:/s", 1));
        let Err(Error::Invalid(sentence)) = of(&[("colour", "red")]) else { panic!() };
        assert!(sentence.contains("colour"));
    }
}
