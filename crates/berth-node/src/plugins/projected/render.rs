//! From a volume and what it refers to, the files that it holds. Pure: no clock, no disk, no API server.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapProjection, DownwardAPIProjection, KeyToPath, Pod, ProjectedVolumeSource, Secret,
    SecretProjection, ServiceAccountTokenProjection, Volume, VolumeProjection,
};

use super::super::fields::{NoValue, metadata_value, resource_value};
use super::super::objects::Objects;
use super::super::{fs_group, fs_user};
use crate::tokens::Token;

const DEFAULT_MODE: i32 = 0o644;
/// Of a file that only its owner may read.
const PRIVATE: i32 = 0o600;
const LONGEST_PATH: usize = 4096;
const LONGEST_NAME: usize = 255;

/// The files of a volume by path, which is relative, clean and leads nowhere else.
pub(in super::super) type Tree = BTreeMap<String, File>;

/// One file; its `Debug` does not show what is in it.
#[derive(Clone, PartialEq, Eq)]
pub(in super::super) struct File {
    /// The content of the file.
    pub(in super::super) bytes: Vec<u8>,
    /// The permission bits of the file.
    pub(in super::super) mode: u32,
    /// The user that it belongs to, if not root.
    pub(in super::super) owner: Option<u32>,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({} bytes, {:o}, owner {:?})", self.bytes.len(), self.mode, self.owner)
    }
}

/// Why a volume cannot be rendered; never holds what is in an object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum Unrendered {
    #[error("{kind} {name:?} not found")]
    Object { kind: &'static str, name: String },
    #[error("{text}: {key}: add it to {kind} {name:?}, or mark the volume optional")]
    Key { text: &'static str, key: String, kind: &'static str, name: String },
    #[error(transparent)]
    Value(#[from] NoValue),
    #[error("invalid path: {0}")]
    Path(String),
    #[error("invalid path: {0} would be both a file and a directory")]
    Conflict(String),
    #[error("a projected volume cannot hold {0} yet: Berth does not serve that kind")]
    Unsupported(&'static str),
    #[error("a token was not fetched")]
    Token,
    #[error("[{}]", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Several(Vec<Unrendered>),
}

/// A configMap, secret, downwardAPI or projected volume, as a projected one.
pub(in super::super) fn as_projected(volume: &Volume) -> Option<ProjectedVolumeSource> {
    let one =
        |default_mode, source| Some(ProjectedVolumeSource { default_mode, sources: Some(vec![source]) });
    if let Some(source) = &volume.projected {
        return Some(source.clone());
    }
    if let Some(source) = volume.config_map.clone() {
        let config_map =
            Some(ConfigMapProjection { name: source.name, items: source.items, optional: source.optional });
        return one(source.default_mode, VolumeProjection { config_map, ..VolumeProjection::default() });
    }
    if let Some(source) = volume.secret.clone() {
        let name = source.secret_name.unwrap_or_default();
        let secret = Some(SecretProjection { name, items: source.items, optional: source.optional });
        return one(source.default_mode, VolumeProjection { secret, ..VolumeProjection::default() });
    }
    let source = volume.downward_api.clone()?;
    let downward_api = Some(DownwardAPIProjection { items: source.items });
    one(source.default_mode, VolumeProjection { downward_api, ..VolumeProjection::default() })
}

/// The tokens that a volume holds, in order.
pub(in super::super) fn tokens_of(
    volume: &ProjectedVolumeSource,
) -> impl Iterator<Item = &ServiceAccountTokenProjection> {
    volume.sources.iter().flatten().filter_map(|source| source.service_account_token.as_ref())
}

/// The files of a volume; `tokens` are those of [`tokens_of`].
pub(in super::super) fn render(
    pod: &Pod,
    volume: &ProjectedVolumeSource,
    objects: &Objects,
    tokens: &[Token],
) -> Result<Tree, Unrendered> {
    let mut rendering = Rendering {
        pod,
        objects,
        tokens: tokens.iter(),
        mode: volume.default_mode.unwrap_or(DEFAULT_MODE),
        tree: Tree::new(),
    };
    let sources = volume.sources.iter().flatten();
    let mut errors: Vec<Unrendered> = sources.filter_map(|source| rendering.source(source).err()).collect();
    match errors.len() {
        0 => {}
        1 => return Err(errors.remove(0)),
        _ => return Err(Unrendered::Several(errors)),
    }
    refuse_conflicts(&rendering.tree)?;
    Ok(rendering.tree)
}

struct Rendering<'a> {
    pod: &'a Pod,
    objects: &'a Objects,
    tokens: std::slice::Iter<'a, Token>,
    mode: i32,
    tree: Tree,
}

impl Rendering<'_> {
    fn source(&mut self, source: &VolumeProjection) -> Result<(), Unrendered> {
        if let Some(source) = &source.secret {
            self.secret(source)
        } else if let Some(source) = &source.config_map {
            self.config_map(source)
        } else if let Some(source) = &source.downward_api {
            self.downward_api(source)
        } else if let Some(source) = &source.service_account_token {
            self.token(source)
        } else if source.cluster_trust_bundle.is_some() {
            Err(Unrendered::Unsupported("a clusterTrustBundle"))
        } else if source.pod_certificate.is_some() {
            Err(Unrendered::Unsupported("a podCertificate"))
        } else {
            Ok(())
        }
    }

    fn config_map(&mut self, source: &ConfigMapProjection) -> Result<(), Unrendered> {
        let data = |object: &ConfigMap| {
            let text = object
                .data
                .clone()
                .unwrap_or_default()
                .into_iter()
                .map(|(key, text)| (key, text.into_bytes()));
            let binary =
                object.binary_data.clone().unwrap_or_default().into_iter().map(|(key, bytes)| (key, bytes.0));
            // Where a key is in both, a mapping takes the text.
            binary.chain(text).collect()
        };
        let found = self.objects.config_maps.get(&source.name).map(|object| data(object));
        let keys = Keys {
            kind: "configmap",
            name: &source.name,
            missing: "configmap references non-existent config key",
            items: source.items.as_deref().unwrap_or_default(),
            optional: source.optional == Some(true),
        };
        self.keys(&keys, found)
    }

    fn secret(&mut self, source: &SecretProjection) -> Result<(), Unrendered> {
        let data = |object: &Secret| {
            object.data.clone().unwrap_or_default().into_iter().map(|(key, bytes)| (key, bytes.0)).collect()
        };
        let found = self.objects.secrets.get(&source.name).map(|object| data(object));
        let keys = Keys {
            kind: "secret",
            name: &source.name,
            missing: "references non-existent secret key",
            items: source.items.as_deref().unwrap_or_default(),
            optional: source.optional == Some(true),
        };
        self.keys(&keys, found)
    }

    fn keys(&mut self, keys: &Keys<'_>, found: Option<BTreeMap<String, Vec<u8>>>) -> Result<(), Unrendered> {
        let mut data = match found {
            Some(data) => data,
            None if keys.optional => return Ok(()),
            None => return Err(Unrendered::Object { kind: keys.kind, name: keys.name.to_owned() }),
        };
        if keys.items.is_empty() {
            for (key, bytes) in std::mem::take(&mut data) {
                self.put(&key, bytes, self.mode, None)?;
            }
        }
        for item in keys.items {
            match data.get(&item.key) {
                Some(bytes) => self.put(&item.path, bytes.clone(), item.mode.unwrap_or(self.mode), None)?,
                None if keys.optional => {}
                None => {
                    return Err(Unrendered::Key {
                        text: keys.missing,
                        key: item.key.clone(),
                        kind: keys.kind,
                        name: keys.name.to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    fn downward_api(&mut self, source: &DownwardAPIProjection) -> Result<(), Unrendered> {
        for item in source.items.iter().flatten() {
            let value = if let Some(field) = &item.field_ref {
                metadata_value(self.pod, &field.field_path)?
            } else if let Some(selector) = &item.resource_field_ref {
                resource_value(self.pod, None, selector, &self.objects.node)?
            } else {
                String::new()
            };
            self.put(&item.path, value.into_bytes(), item.mode.unwrap_or(self.mode), None)?;
        }
        Ok(())
    }

    fn token(&mut self, source: &ServiceAccountTokenProjection) -> Result<(), Unrendered> {
        let token = self.tokens.next().ok_or(Unrendered::Token)?;
        let owner = fs_user(self.pod);
        // Who may read it depends on the owner, or on the group that is given to it later.
        let private = owner.is_some() || fs_group(self.pod).is_some();
        let mode = if private { PRIVATE } else { self.mode };
        self.put(&source.path, token.token.clone().into_bytes(), mode, owner)
    }

    fn put(&mut self, path: &str, bytes: Vec<u8>, mode: i32, owner: Option<u32>) -> Result<(), Unrendered> {
        let mode = u32::try_from(mode).unwrap_or_default() & 0o777;
        self.tree.insert(clean(path)?, File { bytes, mode, owner });
        Ok(())
    }
}

struct Keys<'a> {
    kind: &'static str,
    name: &'a str,
    /// The kubelet's words for a key that is not there.
    missing: &'static str,
    items: &'a [KeyToPath],
    optional: bool,
}

/// The path without empty and `.` elements; refused if it could lead out of the volume, or to its inner workings.
fn clean(path: &str) -> Result<String, Unrendered> {
    let refused = |why: String| Err(Unrendered::Path(why));
    if path.starts_with('/') {
        return refused(format!("must be relative path: {path}"));
    }
    if path.len() > LONGEST_PATH {
        return refused(format!("must be less than or equal to {LONGEST_PATH} characters"));
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if parts.contains(&"..") {
        return refused(format!("must not contain '..': {path}"));
    }
    if path.contains('\0') {
        return refused(format!("must not contain a NUL byte: {path:?}"));
    }
    if parts.iter().any(|part| part.len() > LONGEST_NAME) {
        return refused(format!("filenames must be less than or equal to {LONGEST_NAME} characters"));
    }
    match parts.first() {
        None => refused(format!("must not be empty: {path:?}")),
        Some(first) if first.starts_with("..") => refused(format!("must not start with '..': {path}")),
        Some(_) => Ok(parts.join("/")),
    }
}

fn refuse_conflicts(tree: &Tree) -> Result<(), Unrendered> {
    for path in tree.keys() {
        let parents = path.match_indices('/').map(|(end, _)| &path[..end]);
        if let Some(both) = parents.into_iter().find(|parent| tree.contains_key(*parent)) {
            return Err(Unrendered::Conflict(both.to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
