{{/*
Whole name of objects. At most 52 characters: a StatefulSet's pods carry its name and a hash of 10 characters in one
label of 63. It begins with a letter, as names of Services must: a release may be called 012. A longer one is cut and
ends in a digest, so that the names of two long releases differ.
*/}}
{{- define "kvplane.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = contains $name $release | ternary $release (printf "%s-%s" $release $name) -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- $full = printf "%s-%s" $name $release -}}
{{- end -}}
{{- end -}}
{{- if gt (len $full) 52 -}}
{{- $full = printf "%s-%s" (trunc 43 $full | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end }}

{{/* Labels that never change, of one component: dict "root" $ "component" "service" */}}
{{- define "kvplane.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end }}

{{/* All labels of one component's objects. Every value is quoted: a release may be called "on", or 1e3. */}}
{{- define "kvplane.labels" -}}
{{ include "kvplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
app.kubernetes.io/part-of: "kvplane"
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- range $key, $value := .root.Values.commonLabels }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* metadata of an object: dict "root" $ "component" "service", and if any "suffix" "-headless" "annotations" (dict) */}}
{{- define "kvplane.metadata" -}}
name: {{ .name | default (printf "%s%s" (include "kvplane.fullname" .root) (.suffix | default "")) | quote }}
namespace: {{ .root.Release.Namespace | quote }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
labels: {{- include "kvplane.labels" . | nindent 2 }}
{{- end }}

{{/* registry/repository:tag@digest: dict "root" $ "image" .Values.image */}}
{{- define "kvplane.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository }}:{{ $tag }}{{ with .image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{- define "kvplane.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvplane.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{/* Secret with the service's certificate. */}}
{{- define "kvplane.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "kvplane.fullname" .)) -}}
{{- end }}

{{/* Secret with the keys that seal the store; empty if it is not sealed. */}}
{{- define "kvplane.sealSecret" -}}
{{- if and .Values.store.sealing.enabled (ne .Values.store.type "none") -}}
{{- .Values.store.sealing.existingSecret | default (printf "%s-store-keys" (include "kvplane.fullname" .)) -}}
{{- end -}}
{{- end }}

{{/* Secret with the password of the built-in store. */}}
{{- define "kvplane.valkeySecret" -}}
{{- .Values.store.builtin.existingSecret | default (printf "%s-valkey" (include "kvplane.fullname" .)) -}}
{{- end }}

{{/*
Password of the built-in store: generated at the first install and kept. `helm template` and --dry-run cannot read the
cluster and generate another one, once per rendering: every object of a rendering has the same.
*/}}
{{- define "kvplane.valkeyPassword" -}}
{{- $builtin := .Values.store.builtin -}}
{{- if not (hasKey $builtin "generated") -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "kvplane.valkeySecret" .) -}}
{{- $_ := set $builtin "generated" (get ($old.data | default dict) $builtin.passwordKey | b64dec | default (randAlphaNum 32)) -}}
{{- end -}}
{{- $builtin.generated -}}
{{- end }}

{{/* Differs when the password of the built-in store does: store and service then start again, together. */}}
{{- define "kvplane.valkeyChecksum" -}}
{{- with .Values.store.builtin.existingSecret }}{{ sha256sum . }}{{ else }}{{ include "kvplane.valkeyPassword" . | sha256sum }}{{ end -}}
{{- end }}

{{/* The annotation of pods of the service that have this password. */}}
{{- define "kvplane.passwordAnnotation" -}}
{{- if eq .Values.store.type "builtin" }}checksum/store-password: {{ include "kvplane.valkeyChecksum" . | quote }}{{ end -}}
{{- end }}

{{/* HOST:PORT of the service within the cluster. */}}
{{- define "kvplane.address" -}}
{{ include "kvplane.fullname" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ int .Values.ports.grpc }}
{{- end }}

{{/* Not empty if service processes can share the store, so that one of them owns a replica. */}}
{{- define "kvplane.sharesStore" -}}
{{- if and (include "kvplane.serves" .) (has .Values.store.type (list "external" "builtin")) }}on{{ end -}}
{{- end }}

{{/* Not empty if the service calls the Kubernetes API: for one Lease. */}}
{{- define "kvplane.lease" -}}
{{- if and (include "kvplane.sharesStore" .) (eq .Values.ownership.type "lease") }}on{{ end -}}
{{- end }}

{{/* Not empty if the service is part of this release; otherwise the release has workers alone. */}}
{{- define "kvplane.serves" -}}
{{- if not .Values.gpuWorker.service }}on{{ end -}}
{{- end }}

{{/* Addresses for clients: the service, and the pods to which it redirects them. */}}
{{- define "kvplane.addresses" -}}
{{ include "kvplane.address" . }},{{ include "kvplane.pods" . }}
{{- end }}

{{/* The names of the service's pods, as clients permit redirections to them. */}}
{{- define "kvplane.pods" -}}
*.{{ include "kvplane.fullname" . }}-headless.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{/* The address of each service process, by the name of its pod. */}}
{{- define "kvplane.processes" -}}
{{- $addresses := list -}}
{{- range until (int .Values.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:%d" (include "kvplane.fullname" $) . (include "kvplane.pods" $ | trimPrefix "*.") (int $.Values.ports.grpc)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{/* Not empty if clients must authenticate. */}}
{{- define "kvplane.auth" -}}
{{- if .Values.auth.existingSecret }}on{{ end -}}
{{- end }}

{{/* Fields of every pod of the chart except its containers. No token of the account is mounted, except
     in the container of a service that has a Lease. */}}
{{- define "kvplane.podBasics" -}}
serviceAccountName: {{ include "kvplane.serviceAccountName" . | quote }}
automountServiceAccountToken: false
# Variables such as KVPLANE_STORE_PORT, made for a Service called kvplane-store, would be read as configuration.
enableServiceLinks: false
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}
